"""Train a small GPT with Lightning and ZeRO.

Two ranks on this machine:
    torchrun --nproc-per-node 2 examples/lightning_gpt.py

A run that was stopped resumes from its last checkpoint in `--out`, on any number of ranks. The
script without zpasses lacks the lines that are marked with `# zpasses`.
"""

import argparse
import pydoc_data.topics
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from zpasses.integrations.lightning import ZpassesStrategy  # zpasses

TEXT = "\n\n".join(pydoc_data.topics.topics.values()).encode()
"""English text that comes with Python. One token per byte."""


class GPT(nn.Module):
    """A decoder over bytes. Takes tokens of shape (batch, length) and returns the logits of the
    next ones.
    """

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                4,
                4 * width,
                dropout=0.0,
                activation=F.gelu,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class Module(lightning.LightningModule):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.model = GPT(width, layers, length)

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (windows,) = batch
        logits = self.model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--out", default="build/lightning_gpt", help="folder of the checkpoints")
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--save-steps", type=int, default=25)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=2)
parser.add_argument("--codegen", default="inductor", choices=["inductor", "eager"])  # zpasses
options = parser.parse_args()

lightning.seed_everything(0)
length = 129
count = len(TEXT) // length
windows = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8)[: count * length].long()
data = torch.utils.data.TensorDataset(windows.view(count, length))
module = Module(options.width, options.layers, length)
trainer = lightning.Trainer(
    accelerator="auto" if torch.accelerator.is_available() else "cpu",
    devices=options.ranks,
    strategy=ZpassesStrategy({"codegen": options.codegen}),  # zpasses
    max_steps=options.steps,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    use_distributed_sampler=False,  # it would shuffle
    log_every_n_steps=1,
    logger=CSVLogger(options.out, name=None, version="log"),
    callbacks=ModelCheckpoint(
        options.out, filename="{step}", every_n_train_steps=options.save_steps, save_top_k=-1
    ),
)
done = sorted(Path(options.out).glob("step=*.ckpt"), key=lambda path: int(path.stem[5:]))
# Lightning continues with the first batch, so leave out what the steps before have read.
read = int(done[-1].stem[5:]) * 2 * 8 * options.ranks if done else 0
data = torch.utils.data.Subset(data, range(read, count))
sampler = DistributedSampler(data, options.ranks, trainer.global_rank, shuffle=False)
loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
trainer.fit(module, loader, ckpt_path=done[-1] if done else None)
