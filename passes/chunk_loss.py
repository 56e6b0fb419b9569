"""Compute the head of a language model and its loss for one chunk of tokens after the other.

Before
  logits = mm(hidden, head)
  losses = ...(logits, labels)
  ...
  dlogits = ...(logits, dlosses)
  dhead = mm(t(dlogits), hidden);  dhidden = mm(dlogits, t(head))
After, chunks=2
  a, c, x = rows_0(hidden[:n], head, labels[:n])
  b, d, y = rows_1(hidden[n:], head, labels[n:], c)
  losses = cat([a, b])
  ...
  dhead = mul(d, dloss);  dhidden = mul(cat([x, y]), dloss)
After, chunks=2,gradients=backward
  a = rows_0(hidden[:n], head, labels[:n])
  b = rows_0(hidden[n:], head, labels[n:])
  losses = cat([a, b])
  ...
  c, x = rows_1(hidden[:n], head, labels[:n], dlosses[:n])
  dhead, y = rows_2(hidden[n:], head, labels[n:], dlosses[n:], c)
  dhidden = cat([x, y])

Contract: a head is a product of a matrix with hidden states that makes each token's row wider, and
whose rows are then reduced to values per token. All that is as wide as the logits is computed in
subgraphs, between which only values per token, hidden states, their gradients and sums over tokens
pass (zpasses.graph.loss_chunks). No logits are saved. Parameters are gathered and gradients reduced
as before. A graph that returns its logits, or does with them what has no rows, stays as it is.

Gradients are computed together with the loss, for a gradient of one of the loss, if they are linear
in the gradient of one value that is not float16 (zpasses.graph.loss_gradients). Backward then
multiplies them by the true gradient, and does not read the head. Otherwise, it computes the logits
of each chunk again.

The loss is equal up to the rounding of products of other shapes. The gradients of the head are sums
of one product per chunk, each rounded to the dtype of the gradient. If the gradient of the loss is
one, gradients have the same bits wherever they are computed. Other gradients of the loss round once
more: the multiplication is in the dtype of what is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import fx

from zpasses.errors import OptionError
from zpasses.graph.loss_chunks import Gradients, chunk_regions
from zpasses.pipeline.base_pass import Level, Pass
from zpasses.pipeline.events import note
from zpasses.pipeline.facts import Facts


@dataclass(frozen=True)
class ChunkLoss(Pass):
    """Compute the head and its loss in chunks of tokens."""

    name: ClassVar[str] = "chunk-loss"
    level: ClassVar[Level] = Level.JOINT

    chunks: int | Literal["auto"] = "auto"
    """Number of chunks. `auto` needs the option `memory_budget`, within which the backend chooses:
    one chunk if that fits, or if recomputing activations is faster."""
    gradients: Gradients = "forward"
    """Where gradients of the head and of hidden states are computed: with the loss if possible and
    else in backward, or always in backward, which computes the logits again."""

    def __post_init__(self) -> None:
        if self.chunks != "auto" and self.chunks < 1:
            raise OptionError(
                f"pass 'chunk-loss', option 'chunks': got {self.chunks}; expected 1 or more."
            )

    @property
    def facts(self) -> Facts:
        return Facts(
            reorders_sums=True, chunks_loss=self.gradients if self.chunks == "auto" else None
        )

    def rewrite(self, graph: fx.Graph) -> int:
        """Returns the number of heads that are computed in chunks."""
        if self.chunks == "auto" or self.chunks == 1:
            return 0
        found = chunk_regions(graph, self.chunks, self.gradients)
        for each in found.notes:
            note(f"{self.name}: {each}")
        return found.changed
