"""The torch.compile backend: it takes one captured graph through all levels of a pipeline to
runnable code.
"""
