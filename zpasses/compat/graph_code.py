"""The code of one graph in a result of AOTAutograd that can be stored.

This module imports Inductor, so it is imported when a compile needs it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
from torch._inductor.output_code import OutputCode

Code = Callable[[list[Any]], Any]

_code_of: contextvars.ContextVar[Callable[[str], Code]] = contextvars.ContextVar(
    "zpasses.graph_code"
)


@contextlib.contextmanager
def loader(code_of: Callable[[str], Code]) -> Iterator[None]:
    """Inside, a stored result gets the code of its graphs from `code_of`, by the graph's kind."""
    token = _code_of.set(code_of)
    try:
        yield
    finally:
        _code_of.reset(token)


@dataclass
class GraphCode(OutputCode):
    """Code of a graph. Only the kind of the graph is stored."""

    kind: str
    run: Code | None = None
    _boxed_call: bool = True

    def __call__(self, inputs: Sequence[Any]) -> Any:
        assert self.run is not None
        return self.run(inputs)  # type: ignore[arg-type]  # torch passes a list to boxed code

    def stored(self) -> GraphCode:
        """Returns what is stored of it."""
        return GraphCode(self.kind)

    def prepare_for_serialization(self) -> None:
        # torch would store it in its own cache, where a hit would skip votes.
        raise BypassAOTAutogradCache("zpasses stores this graph")

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        self.run = _code_of.get()(self.kind)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Kernels belong to the code that `run` loads."""
