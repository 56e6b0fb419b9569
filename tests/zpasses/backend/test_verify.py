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
from tests.on_ranks import on_ranks
from zpasses import Facts, Level, Pass, PassError, Pipeline
from zpasses.graph.queries import Editor, calls
from zpasses.testing import fake_world

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


@pytest.mark.parametrize(("size", "rank"), [(1, 0), (3, 2)])
@pytest.mark.parametrize("text", ["zero1", "zero3,schedule{mode=flat}"])
@pytest.mark.slow(quick="test_rounding_must_be_equal_unless_the_pass_reorders_sums")
def test_our_passes_compute_the_same_on_simulated_ranks(size, rank, text):
    with fake_world(size, rank) as mesh:
        step(text, mesh=mesh)


def test_all_reduce_and_this_ranks_slice_compute_the_same():
    with fake_world(3, 1) as mesh:
        step("gather-params,reduce-grads{form=all_reduce},schedule{mode=flat}", mesh=mesh)


@dataclass(frozen=True)
class HidesItsChanges(Sums):
    """Returns 0, which the static checks refuse."""

    name: ClassVar[str] = "hides-its-changes"

    def rewrite(self, graph):
        return super().rewrite(graph) * 0


CHECKS = [
    (Sums(), "static", r"simulate", r"pass 'sums': on simulated ranks, output \d.*differ"),
    (HidesItsChanges(), "off", "static", "'hides-its-changes'"),
]


@pytest.mark.parametrize(("broken", "passes", "refuses", "said"), CHECKS)
def test_option_changes_the_run(broken, passes, refuses, said):
    with fake_world(2) as mesh:
        step(pipeline("zero3", broken), mesh=mesh, verify=passes)
        with pytest.raises(Refused, match=said):
            step(pipeline("zero3", broken), mesh=mesh, verify=refuses)


def test_rounding_must_be_equal_unless_the_pass_reorders_sums():
    with fake_world(2) as mesh:
        step(pipeline("zero3", Admits()), mesh=mesh)
        with pytest.raises(Refused, match=r"pass 'reassociates': on simulated ranks, output \d"):
            step(pipeline("zero3", Reassociates()), mesh=mesh)


class Own(nn.Module):
    """Calls a function with its weight."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(4, 4)), function

    def forward(self, x):
        return self.function(x, self.weight)


def simulated(function, mesh, x):
    torch._dynamo.reset()
    model = zpasses.shard(Own(function), mesh=mesh)
    options = {"zero_stage": 3, "codegen": "eager", "verify": "simulate"}
    with torch.no_grad():
        torch.compile(model, backend="zpasses", options=options)(x)


def test_two_meshes_are_two_axes():
    with fake_world(4, 1):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        group = mesh.get_group("tensor").group_name

        def tensor_parallel(x, weight):
            return F.wait_tensor(F.all_reduce(x @ weight.t(), "sum", group))

        simulated(tensor_parallel, mesh["data"], torch.ones(2, 4))


def test_graph_that_cannot_be_simulated_is_an_error_that_says_so():
    said = r"cannot run the graph before pass"
    with fake_world(2) as mesh, pytest.raises(Refused, match=said):
        simulated(lambda x, weight: torch.linalg.cholesky(x) @ weight, mesh, torch.eye(4))


def test_other_values_are_refused():
    expected = "expected 'off' or 'static' or 'simulate'"
    with fake_world(1) as mesh, pytest.raises(Refused, match=expected):
        step("zero3", mesh=mesh, verify="never")


@pytest.mark.slow(quick="test_option_changes_the_run")
@on_ranks(2)
def test_real_ranks_simulate_while_they_compile():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    step("zero3", mesh=mesh)
    with pytest.raises(Refused, match=r"pass 'sums': on simulated ranks"):
        step(pipeline("zero3", Sums()), mesh=mesh)
