"""A compiled graph that was read from the compile cache, on its way to code that runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zpasses import compat
from zpasses.backend.cache.artifacts import GraphArtifacts
from zpasses.backend.code import Codegen, Compiled, GraphCompiler, Template
from zpasses.runtime.codegen import boxed
from zpasses.runtime.forward import first_variant
from zpasses.runtime.forward_variants import ForwardVariant

__all__ = ["StoredGraph"]


class StoredGraph:
    """Code of a graph, which can be called after `finish`.

    Nothing here asks other ranks until `finish`.

    Args:
        artifacts: what was read.
        inputs: fake inputs of the captured graph.
        graphs: makes code of its graphs.
        codegen: returns a code generator with these arguments of Inductor's `inner_compile`.

    Raises:
        Exception: any kind, from damaged files, and from sizes that the graph was not made for.
    """

    def __init__(
        self,
        artifacts: GraphArtifacts,
        inputs: Sequence[Any],
        graphs: GraphCompiler,
        codegen: Callable[[Mapping[str, Any]], Codegen],
    ) -> None:
        entry, mode = artifacts.entry, compat.fake_mode_of(inputs)
        assert entry.result is not None
        assert entry.forward is not None
        assert mode is not None
        self._artifacts, self._graphs, self._codegen = artifacts, graphs, codegen
        self._mode, self._forward = mode, entry.forward
        self._code: dict[str, Compiled] = {}
        self.compiled = compat.unpack_result(entry.result, inputs, self._late)
        """Takes the inputs of the captured graph."""
        self._template = self._template_of(self._forward.kind)
        with self._template.state.restored():
            graphs.preload(self._forward.kind, self._first_variant())

    def _first_variant(self) -> ForwardVariant | None:
        facts = self._forward
        return first_variant(facts.slots) if facts.slots else None

    def finish(self) -> None:
        """Compares collectives with the other ranks, and makes the forward ready to run.

        Raises:
            AgreementError: on every rank, if they differ.
        """
        self._graphs.agree_on(self._forward.sequences)
        self._code[self._forward.kind] = self._graphs.forward(self._template, self._forward)

    def _late(self, kind: str) -> Compiled:
        def run(args: list[Any]) -> Any:
            code = self._code.get(kind)
            if code is None:  # the first backward
                with self._graphs.compiling_late():
                    code = self._code[kind] = self._backward()
            return code(args)

        return boxed(run)

    def _backward(self) -> Compiled:
        facts = self._artifacts.entry.backward
        assert facts is not None
        self._graphs.agree_on(facts.sequences)
        return self._graphs.backward(self._template_of("backward"), facts)

    def _template_of(self, kind: str) -> Template:
        graph = functools.cache(lambda: self._artifacts.template(kind, self._mode))
        settings = {
            "is_backward": kind == "backward",
            "is_inference": kind == "inference",
            "static_input_idxs": tuple(self._artifacts.entry.static_inputs[kind]),
        }
        return Template(
            kind,
            graph,
            lambda: [node.meta["val"] for node in graph().graph.find_nodes(op="placeholder")],
            self._codegen(settings),
            compat.CompilerState(self._mode),
        )
