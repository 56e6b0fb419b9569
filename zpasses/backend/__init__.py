"""The torch.compile backend: one captured graph through all levels of a pipeline to runnable
code."""
