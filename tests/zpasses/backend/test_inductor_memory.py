"""How long Inductor's code holds what collectives read."""

import operator

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from zpasses import compat
from zpasses.graph.queries import Editor
from zpasses.testing import fake_world

pytestmark = [pytest.mark.inductor, pytest.mark.filterwarnings("ignore:dynamo_pgo")]

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def reduced_twice(*, coalesced):
    """A product is reduced and scattered, then averaged while another product runs."""
    graph, mode = torch.fx.Graph(), compat.FakeTensorMode()
    a, x = graph.placeholder("a"), graph.placeholder("x")
    with mode:
        for node in (a, x):
            node.meta["val"] = torch.empty(4, 4)
    output = graph.output(())
    edit = Editor(graph, before=output)
    part = edit.call(aten.mm.default, a, a)
    if coalesced:
        several = edit.call(c10d.reduce_scatter_tensor_coalesced.default, [part], "avg", 2, "0")
        shard = edit.call(operator.getitem, several, 0)
    else:
        shard = edit.call(c10d.reduce_scatter_tensor.default, part, "avg", 2, "0")
    shard = edit.call(c10d.wait_tensor.default, shard)
    if coalesced:
        several = edit.call(c10d.all_reduce_coalesced.default, [shard], "avg", "0")
        mean = edit.call(operator.getitem, several, 0)
    else:
        mean = edit.call(c10d.all_reduce.default, shard, "avg", "0")
    beside = edit.call(aten.mm.default, x, x)
    output.args = ((beside, edit.call(c10d.wait_tensor.default, mean)),)
    return torch.fx.GraphModule({}, graph), [a.meta["val"], x.meta["val"]]


@pytest.mark.parametrize("coalesced", [False, True])
def test_the_input_of_a_reduction_is_freed_when_the_average_of_its_result_starts(coalesced):
    patches = {"reorder_for_peak_memory": False, "force_disable_caches": True}
    with fake_world(2), torch.no_grad():
        gm, values = reduced_twice(coalesced=coalesced)

        def run():
            inputs = [torch.ones(4, 4), torch.ones(4, 4)]
            return compat.inductor_codegen_standalone(gm, values, patches)(inputs)

        (_, mean), (code,) = run_and_get_code(run)
    lines = [line.strip() for line in code[code.index("args.clear()") :].splitlines()]
    waits = [at for at, line in enumerate(lines) if "wait_tensor.default(" in line]
    (started,) = (at for at, line in enumerate(lines) if ".all_reduce_" in line)
    (reused,) = (at for at, line in enumerate(lines) if "del buf0  # reuse" in line)
    assert waits[0] < reused < waits[1]  # by the other product
    assert waits[0] < started < waits[1]
    assert mean.shape == (2, 4)
    assert not any("copy" in line or "cpp_fused" in line for line in lines)  # reduced in place
