"""Tests of Inductor's code for the ops: no input or output of a gather is freed or reused before it
is awaited.
"""

import operator
import re
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch._inductor import config, lowering
from torch._inductor.utils import run_and_get_code
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.foreign import simple_fsdp
from zpasses import Level, Pass, Pipeline, compat
from zpasses.graph.queries import Editor, collectives
from zpasses.passes import Sdma
from zpasses.sdma.ops import SDMA_ALL_GATHER, SDMA_ALL_GATHER_COALESCED, SDMA_ALL_GATHER_OUT
from zpasses.testing import fake_world

pytestmark = [pytest.mark.inductor, pytest.mark.filterwarnings("ignore:dynamo_pgo")]

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default


def graph_with_compute_beside(op):
    """A computed tensor is gathered while two products run, which could reuse its memory. The
    function has only matrix products, so no kernel is compiled.
    """
    graph, mode = torch.fx.Graph(), compat.FakeTensorMode()
    a, x = graph.placeholder("a"), graph.placeholder("x")
    with mode:
        for node in (a, x):
            node.meta["val"] = torch.empty(4, 4)
    output = graph.output(())
    edit = Editor(graph, before=output)
    part = edit.call(aten.mm.default, a, a)
    if op is SDMA_ALL_GATHER_OUT:
        out = edit.call(
            aten.empty.memory_format, [8, 4], dtype=torch.float32, device=torch.device("cpu")
        )
        started = edit.call(op, part, 2, "0", out=out)
    elif op is SDMA_ALL_GATHER_COALESCED:
        started = edit.call(operator.getitem, edit.call(op, [part], 2, "0"), 0)
    else:
        started = edit.call(op, part, 2, "0")
    beside = edit.call(aten.mm.default, edit.call(aten.mm.default, x, x), x)
    done = edit.call(aten.mm.default, edit.call(WAIT, started), x)
    output.args = ((beside, done),)
    return torch.fx.GraphModule({}, graph), [a.meta["val"], x.meta["val"]]


def code_of(op):
    """Returns the calls, allocations and deletions of the generated code."""
    patches = {
        "reorder_for_peak_memory": False,
        "reorder_for_locality": False,
        "force_disable_caches": True,
    }
    with fake_world(2), torch.no_grad():
        gm, values = graph_with_compute_beside(op)

        def run():
            return compat.inductor_codegen_standalone(gm, values, patches)(
                [torch.ones(4, 4), torch.ones(4, 4)]
            )

        _, (code,) = run_and_get_code(run)
    body = code[code.index("args.clear()") :].partition("return (")[0]
    lines = [line.strip() for line in body.splitlines()[1:]]
    kept = [line for line in lines if line and not line.startswith(("#", "assert_"))]
    return [
        re.sub(r"empty_strided_cpu\((\(\d+, \d+\)).*", r"empty\1", line.replace("torch.ops.", ""))
        for line in kept
    ]


def test_input_of_a_gather_is_freed_after_its_wait():
    assert_expected_inline(
        "\n".join(code_of(SDMA_ALL_GATHER)),
        """\
buf0 = empty(4, 4)
extern_kernels.mm(a, a, out=buf0)
del a
buf1 = zpasses.sdma_all_gather.default(buf0, 2, '0')
buf2 = empty(4, 4)
extern_kernels.mm(x, x, out=buf2)
buf3 = empty(4, 4)
extern_kernels.mm(buf2, x, out=buf3)
del buf2
_c10d_functional.wait_tensor.default(buf1)
del buf0
buf6 = empty(8, 4)
extern_kernels.mm(buf1, x, out=buf6)
del buf1
del x""",
    )


def test_input_of_a_gather_into_given_memory_is_not_reused():
    """The op keeps its input alive, as the functional collective does."""
    assert_expected_inline(
        "\n".join(code_of(SDMA_ALL_GATHER_OUT)),
        """\
buf0 = empty(4, 4)
extern_kernels.mm(a, a, out=buf0)
del a
buf1 = empty(8, 4)
zpasses.sdma_all_gather_out.default(buf0, 2, '0', out=buf1)
buf6 = empty(4, 4)
extern_kernels.mm(x, x, out=buf6)
buf7 = empty(4, 4)
extern_kernels.mm(buf6, x, out=buf7)
del buf6
_c10d_functional.wait_tensor.default(buf1)
buf10 = empty(8, 4)
extern_kernels.mm(buf1, x, out=buf10)
del buf1
del x""",
    )


def test_inputs_of_several_gathers_are_freed_after_their_waits():
    code = code_of(SDMA_ALL_GATHER_COALESCED)
    wait = next(at for at, line in enumerate(code) if "wait_tensor" in line)
    assert "zpasses.sdma_all_gather_coalesced.default([buf0], 2, '0')" in "\n".join(code[:wait])
    started = next(at for at, line in enumerate(code) if "coalesced" in line)
    assert not any("buf0" in line for line in code[started + 1 : wait])


def test_without_the_lowering_the_input_is_freed_while_it_is_read(monkeypatch):
    """The lowering exists because of this."""
    monkeypatch.setattr(compat.inductor, "_declared_collectives", {})
    monkeypatch.delitem(lowering.lowerings, SDMA_ALL_GATHER, raising=False)
    code = code_of(SDMA_ALL_GATHER)
    freed_at = next(
        at
        for at, line in enumerate(code)
        if line.startswith("del buf0") or line.endswith("= buf0; del buf0  # reuse")
    )
    assert freed_at < next(at for at, line in enumerate(code) if "wait_tensor" in line)


def test_lowering_is_part_of_the_cache_key(monkeypatch):
    """Inductor's own cache key does not cover lowerings. The key of each pass covers the source of
    zpasses, which contains them.
    """
    before = Sdma().uuid()
    monkeypatch.setattr("zpasses.pipeline.base_pass.package_digest", lambda: "another lowering")
    assert Sdma().uuid() != before


@dataclass(frozen=True)
class Watch(Pass):
    """Records the collectives of every graph it sees."""

    name: ClassVar[str] = "watch"
    level: ClassVar[Level] = Level.PARTITIONED

    seen: list = field(default_factory=list)

    def rewrite(self, graph):
        self.seen.append([each.op for _, each in collectives(graph)])
        return 0


def tensor_parallel(mesh):
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    return parallelize_module(
        model,
        mesh,
        {
            "0": ColwiseParallel(input_layouts=Shard(0)),
            "1": RowwiseParallel(output_layouts=Shard(0)),
        },
    )


def test_graphs_of_other_libraries_are_swapped_in_inductors_hook(monkeypatch):
    """The pass registers the lowering. Nothing else has registered the ops with Inductor."""
    monkeypatch.setenv("ZPASSES_TARGET", "mi300x")
    seen = {}
    for name, make, width in (
        ("simple_fsdp", simple_fsdp, 6),
        ("tensor_parallel", tensor_parallel, 8),
    ):
        watch = Watch()
        hook = Pipeline((Sdma("all"), watch))
        torch._dynamo.reset()
        monkeypatch.delitem(lowering.lowerings, SDMA_ALL_GATHER, raising=False)
        with (
            fake_world(2) as mesh,
            config.patch(post_grad_custom_post_pass=hook, force_disable_caches=True),
        ):
            model = make(mesh, activation=nn.Identity) if make is simple_fsdp else make(mesh)
            torch.compile(model, fullgraph=True)(torch.ones(2, width)).sum().backward()
        assert SDMA_ALL_GATHER in lowering.lowerings
        seen[name] = watch.seen
    assert seen["simple_fsdp"][0] == ["sdma_all_gather"] * 2
    forward, backward = seen["tensor_parallel"]
    assert (forward[0], "sdma_all_gather" in backward) == ("sdma_all_gather", True)
