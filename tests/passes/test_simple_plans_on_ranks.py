"""Simple plans in the code of Inductor, on real gloo ranks."""

import re

import pytest
import torch
from torch import nn

import zpasses
from zpasses.testing import run_on_ranks, world_mesh


def backward_code():
    """Returns the code that Inductor generates for a backward whose three gradients share a flat
    all-reduce.
    """
    from torch._inductor.utils import run_and_get_code

    squares = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(3)))
    zpasses.shard(squares, mesh=world_mesh())
    flat = "schedule{plan=single,mode=flat,memory_budget=1GiB}"
    pipeline = f"gather-params,reduce-grads{{form=all_reduce}},{flat}"
    step = torch.compile(squares, backend="zpasses", options={"pipeline": pipeline})
    _, codes = run_and_get_code(lambda: step(torch.ones(8, 16)).tanh().sum().backward())
    return codes[-1]


@pytest.mark.processes
@pytest.mark.inductor
def test_inductor_computes_gradients_into_their_slices_of_a_flat_bucket():
    code = run_on_ranks(backward_code)[0]
    (bucket,) = re.findall(r"_c10d_functional\.all_reduce_\.default\((\w+),", code)
    alias = rf"(\w+) = reinterpret_tensor\({bucket}, \(16, 16\), \(16, 1\), (\d+)\)  # alias"
    slots = dict(re.findall(alias, code))
    assert sorted(map(int, slots.values())) == [0, 256, 512]
    for slot in slots:
        assert re.search(rf"extern_kernels\.mm\(.*out={slot}\)", code), code
    assert "cat" not in code.partition("def call")[2]
