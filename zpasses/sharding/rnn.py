"""Sharded `nn.RNN`, `nn.GRU` and `nn.LSTM`.

These modules keep their weights in a list, too, which their kernel reads. Sharded, the list is
gathered when it is read. Dynamo does not trace these modules, so compiled code reads it between
two graphs, and backward reduces the gradients as those of other uncompiled reads.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Container, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from zpasses import compat
from zpasses.errors import ShardingError

LIST_OF_WEIGHTS = "_flat_weights"

# Of this thread, because threads may run one module, each with gathered weights of its own.
_held: contextvars.ContextVar[Mapping[int, list[Any]]] = contextvars.ContextVar(
    "zpasses.rnn_weights", default=MappingProxyType({})
)
"""Identity of a module -> what its list is for now."""


class ShardedRNN(nn.Module):
    """Mixin of sharded RNNs, which precedes their own class."""

    _flat_weights_names: list[str]

    @property
    def _flat_weights(self) -> list[Any]:
        if torch.compiler.is_compiling():
            return [getattr(self, name, None) for name in self._flat_weights_names]
        held = _held.get().get(id(self))
        return held if held is not None else self._read_weights()

    @_flat_weights.setter
    def _flat_weights(self, weights: list[Any]) -> None:
        """Keeps nothing: the list follows the parameters."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The own forward, with one read of the weights."""
        if torch.compiler.is_compiling():  # torch._dynamo.config.allow_rnn; the graph merges reads
            return super().forward(*args, **kwargs)
        with self._holding(self._flat_weights):
            return super().forward(*args, **kwargs)

    def flatten_parameters(self) -> None:
        """Does nothing: gathered weights have no memory to keep."""

    def _init_flat_weights(self) -> None:
        pass

    def _update_flat_weights(self) -> None:
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_flat_weights_names", ()):
            with self._holding([None] * len(self._flat_weights_names)):  # or torch would read it
                super().__setattr__(name, value)
        else:
            super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        with self._holding([None] * len(state["_flat_weights_names"])):
            super().__setstate__(state)  # type: ignore[no-untyped-call]

    def _read_weights(self) -> list[Any]:
        """Gathers the weights. One that is not there, such as a pruned one, is None.

        Raises:
            ShardingError: for an AttributeError of a read, for which Python would look for the list
                elsewhere, and say that there is none.
        """
        try:
            return [
                getattr(self, name) if self._has_weight(name) else None
                for name in self._flat_weights_names
            ]
        except AttributeError as error:
            raise ShardingError(
                f"reading the weights of a {type(self).__name__} failed: AttributeError: {error}"
            ) from error

    def _has_weight(self, name: str) -> bool:
        held = name in self._parameters or name in self.__dict__
        return held or parametrize.is_parametrized(self, name)

    @contextlib.contextmanager
    def _holding(self, weights: list[Any]) -> Iterator[None]:
        token = _held.set({**_held.get(), id(self): weights})
        try:
            yield
        finally:
            _held.reset(token)


compat.begin_no_compile_at(ShardedRNN.forward)


def rnns_with(params: Container[int], model: nn.Module) -> list[nn.RNNBase]:
    """Return the RNNs of a model that have some of these parameters, given by their identity."""
    rnns = [module for module in model.modules() if isinstance(module, nn.RNNBase)]
    return [rnn for rnn in rnns if any(id(param) in params for param in rnn.parameters())]


def drop_weights(module: nn.RNNBase) -> None:
    """Let a module that is sharded hold no full weights in its list."""
    count = len(module._flat_weights_names)
    vars(module).update({LIST_OF_WEIGHTS: [None] * count, "_flat_weight_refs": [None] * count})
