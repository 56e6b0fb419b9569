"""What passes share that lower the dialect: the options `encode`, `block`, `exact_below_kib`."""

from __future__ import annotations

import functools
import logging
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from zpasses import compat
from zpasses.errors import OptionError
from zpasses.graph.dialect import group_size, rows_per_rank
from zpasses.graph.encoding import ENCODED_DTYPES, Encoding, Format
from zpasses.graph.queries import calls, named_arguments
from zpasses.pipeline.base_pass import Pass
from zpasses.pipeline.events import note
from zpasses.pipeline.facts import Facts

log = logging.getLogger("zpasses")

EXACT_BELOW_KIB = 16.0
"""What `exact_below_kib` is if it is not given."""


@dataclass(frozen=True)
class EncodeOptions:
    """What a pass encodes, and how."""

    encoding: Encoding
    exact_below_bytes: float

    @classmethod
    def of(
        cls,
        name: str,
        encode: Format | None,
        block: int | None,
        exact_below_kib: float,
        *,
        feedback: bool = False,
    ) -> EncodeOptions | None:
        """Returns what the options of a pass say; None if it encodes nothing.

        Raises:
            OptionError: for a value without a meaning.
        """
        if block is not None and block < 1:
            raise OptionError(
                f"pass {name!r}, option 'block': got {block}; expected values per scale, >= 1."
            )
        if not exact_below_kib >= 0:
            raise OptionError(
                f"pass {name!r}, option 'exact_below_kib': got {exact_below_kib}; expected KiB >= "
                "0 (0: every matrix is encoded)."
            )
        if encode is not None:
            return cls(Encoding.of(encode, block, feedback=feedback), exact_below_kib * 1024)
        for given, text in (
            (block is not None, f"block={block}"),
            (exact_below_kib != EXACT_BELOW_KIB, f"exact_below_kib={exact_below_kib:g}"),
            (feedback, "feedback=on"),
        ):
            if given:
                raise OptionError(
                    f"pass {name!r}: {text} without 'encode' has no effect. Give a format, such "
                    f"as encode=int8, or leave {text.partition('=')[0]} out."
                )
        return None

    def chosen(
        self, value: torch.Tensor, rows: Any, dtype: torch.dtype, group: str
    ) -> Encoding | None:
        """Returns how a tensor is encoded, equally on all ranks; None if it stays exact.

        Args:
            value: what a rank holds of it, [any, ...]. It and `dtype` need not agree.
            rows: rows of the full tensor.
            dtype: in which exact values would be communicated.
        """
        ranks = group_size(group)
        if value.dtype not in ENCODED_DTYPES or value.dim() < 2 or ranks == 1:
            return None
        width = math.prod(map(compat.planned_size, value.shape[1:]))
        rows = compat.planned_size(rows)
        if rows * width * dtype.itemsize < self.exact_below_bytes or rows * width == 0:
            return None
        count = rows_per_rank(rows, ranks) * width
        smaller = self.encoding.record_bytes(count) < count * dtype.itemsize
        return self.encoding if smaller else None


@functools.cache
def warn_once(text: str) -> None:
    """Warn of what a pass also notes, once per process."""
    log.warning("%s", text)


class EncodingPass(Pass):
    """A pass that lowers an operator of the dialect, and may encode what it communicates.

    Subclasses declare the options, because their meanings differ.
    """

    encoded: ClassVar[compat.OpOverload]
    """The operator, whose argument `encoding` says how its values are encoded."""
    exact_because: ClassVar[str] = (
        "Exact are scalars and vectors, what is smaller than exact_below_kib, what would not "
        "become smaller, dtypes other than fp32, bf16 and fp16, and all on one rank"
    )
    """Why a graph may have nothing to encode."""
    encode: Format | None
    block: int | None
    exact_below_kib: float

    def __post_init__(self) -> None:
        self._encode_options()

    def _encode_options(self) -> EncodeOptions | None:
        return EncodeOptions.of(self.name, self.encode, self.block, self.exact_below_kib)

    @property
    def facts(self) -> Facts:
        return Facts(changes_values=self.choose_encodings if self.encode else None)

    def choose_encodings(self, graph: fx.Graph) -> None:
        """Gives the calls that are to be encoded the argument that says so."""
        options = self._encode_options()
        if options is None:
            return
        for node in calls(graph, self.encoded):
            self.choose_encoding(node, options)

    def say_if_exact(self, graph: fx.Graph) -> None:
        """Says that a pass encodes nothing of a graph although it should."""
        found = calls(graph, self.encoded) if self.encode is not None else []
        if self.encode is None or any(
            named_arguments(node, self.encoded).get("encoding") for node in found
        ):
            return
        text = f"{self.name}: encode={self.encode} encodes nothing here. {self.exact_because}"
        note(text)
        if found:
            warn_once(f"{text}.")

    @abstractmethod
    def choose_encoding(self, node: fx.Node, options: EncodeOptions) -> None:
        """Gives a call the argument if its values are to be encoded and it has none."""
