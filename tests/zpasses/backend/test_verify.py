"""`options={"verify": "simulate"}`: every pass runs on simulated ranks while it compiles."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from tests.cases import some_quick
from zpasses import Facts, Level, Pass, PassError, Pipeline
from zpasses.graph.queries import Editor, calls
from zpasses.testing import fake_world, run_on_ranks

Refused = (BackendCompilerFailed, PassError)
"""Torch wraps what a backend raises in forward."""

aten, F = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True)
class Sums(Pass):
    """Makes sums of averages, which no static check can know to be wrong."""

    name: ClassVar[str] = "sums"
    level: ClassVar[Level] = Level.BACKWARD

    def rewrite(self, graph):
        found = calls(graph, F.reduce_scatter_tensor.default, F.all_reduce.default)
        for node in found:
            node.args = (node.args[0], "sum", *node.args[2:])
        return len(found)


@dataclass(frozen=True)
class Reassociates(Pass):
    """Computes x * 3 as x * 0.1 * 30, which rounds differently."""

    name: ClassVar[str] = "reassociates"
    level: ClassVar[Level] = Level.FORWARD

    def rewrite(self, graph):
        found = [node for node in calls(graph, aten.mul.Tensor) if node.args[1] == 3]
        for node in found:
            part = Editor(graph, before=node).call(aten.mul.Tensor, node.args[0], 0.1)
            node.args = (part, 30.0)
        return len(found)


@dataclass(frozen=True)
class Admits(Reassociates):
    name: ClassVar[str] = "admits"
    facts: ClassVar[Facts] = Facts(reorders_sums=True)


@dataclass(frozen=True)
class HidesItsChanges(Sums):
    """Returns 0, which the static checks refuse."""

    name: ClassVar[str] = "hides-its-changes"

    def rewrite(self, graph):
        return super().rewrite(graph) * 0


class Model(nn.Module):
    def __init__(self, rows=5):
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.first = nn.Linear(6, rows)
        self.norm = nn.LayerNorm(rows)
        self.last = nn.Linear(rows, 8, bias=False)
        self.last.weight = nn.Parameter(torch.zeros(8, rows))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.first(self.embedding(x)))
        return self.last(self.norm(hidden) * 3) * self.scale


def step(pipeline, *, mesh, rows=5, **options):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = zpasses.shard(Model(rows), mesh=mesh)
    options = {"pipeline": pipeline, "codegen": "eager", "verify": "simulate", **options}
    compiled = torch.compile(model, backend="zpasses", options=options)
    compiled(torch.arange(6).reshape(2, 3)).sum().backward()


def pipeline(text, *passes):
    return Pipeline((*Pipeline.parse(text), *passes))


@pytest.mark.parametrize(
    ("size", "rank"), some_quick([(1, 0), (2, 0), (3, 2), (4, 3)], [(1, 0), (3, 2)])
)
@pytest.mark.parametrize(
    "text",
    some_quick(["zero1", "zero3", "zero3,bucket{mode=flat}"], ["zero1", "zero3,bucket{mode=flat}"]),
)
@pytest.mark.slow(quick="test_rounding_must_be_equal_unless_the_pass_reorders_sums")
def test_our_passes_compute_the_same_on_simulated_ranks(size, rank, text):
    with fake_world(size, rank) as mesh:
        step(text, mesh=mesh)


def test_all_reduce_and_this_ranks_slice_compute_the_same():
    with fake_world(3, 1) as mesh:
        step("gather-params,reduce-grads{form=all_reduce},bucket{mode=flat}", mesh=mesh)


def test_option_changes_the_run():
    broken = pipeline("zero3", Sums())
    with fake_world(2) as mesh:
        step(broken, mesh=mesh, verify="static")
        with pytest.raises(Refused, match=r"pass 'sums': on simulated ranks, output \d.*differ"):
            step(broken, mesh=mesh)


def test_off_checks_nothing():
    broken = pipeline("zero3", HidesItsChanges())
    with fake_world(2) as mesh:
        step(broken, mesh=mesh, verify="off")
        with pytest.raises(Refused, match="'hides-its-changes'"):
            step(broken, mesh=mesh, verify="static")


def test_rounding_must_be_equal_unless_the_pass_reorders_sums():
    with fake_world(2) as mesh:
        step(pipeline("zero3", Admits()), mesh=mesh)
        with pytest.raises(Refused, match=r"pass 'reassociates': on simulated ranks, output \d"):
            step(pipeline("zero3", Reassociates()), mesh=mesh)


def test_two_meshes_are_two_axes():
    with fake_world(4, 1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        group = mesh.get_group("tensor").group_name

        class WithTensorParallel(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.ones(4, 6))

            def forward(self, x):
                partial = torch.ops._c10d_functional.all_reduce(x @ self.weight.t(), "sum", group)
                return torch.ops._c10d_functional.wait_tensor(partial)

        torch._dynamo.reset()
        model = zpasses.shard(WithTensorParallel(), mesh=mesh["data"])
        options = {"zero_stage": 3, "codegen": "eager", "verify": "simulate"}
        with torch.no_grad():
            torch.compile(model, backend="zpasses", options=options)(torch.ones(2, 6))


def test_graph_that_cannot_be_simulated_is_an_error_that_says_so():
    class DataDependent(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return torch.linalg.cholesky(x) @ self.weight

    torch._dynamo.reset()
    with fake_world(2) as mesh:
        model = zpasses.shard(DataDependent(), mesh=mesh)
        options = {"codegen": "eager", "verify": "simulate"}
        compiled = torch.compile(model, backend="zpasses", options=options)
        with torch.no_grad(), pytest.raises(Refused, match=r"cannot run the graph before pass"):
            compiled(torch.eye(4))


def test_other_values_are_refused():
    expected = "expected 'off' or 'static' or 'simulate'"
    with fake_world(1) as mesh, pytest.raises(Refused, match=expected):
        step("zero3", mesh=mesh, verify="never")


def _on_gloo():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    step("zero3", mesh=mesh)
    with pytest.raises(Refused, match=r"pass 'sums': on simulated ranks"):
        step(pipeline("zero3", Sums()), mesh=mesh)


@pytest.mark.slow(quick="test_option_changes_the_run")
@pytest.mark.processes
def test_real_ranks_simulate_while_they_compile():
    run_on_ranks(_on_gloo)
