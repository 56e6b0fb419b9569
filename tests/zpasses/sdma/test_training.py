"""Tests of stage 3 on two gloo ranks with the fake mori: training with replaced gathers equals
functional gathers bit for bit.
"""

import pytest
import torch
from torch import nn

from tests.cases import some_quick
from tests.fake_mori import Settings, installed
from zpasses.dumps import read
from zpasses.inspect.overview_page import list_view
from zpasses.inspect.view import Text
from zpasses.testing import run_in_fresh_ranks, run_on_ranks, world_mesh

PLAIN = "merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing}"
SINGLE = f"{PLAIN},schedule{{plan=one-ahead,cap_mb=0,copy_engines=off}}"
MERGED = "schedule{{plan=one-ahead,mode={},memory_budget=1GiB,copy_engines=off}}"
COALESCED = f"{PLAIN},{MERGED.format('coalesced')},defer-reduction"
FLAT = f"{PLAIN},{MERGED.format('flat')}"
REPLACE_GATHERS = ",sdma{gathers=all}"
GAINING = "mi300x,launch_us=0.01,hop_us=0.01,link_gb_s=0.02"
"""A target whose engines gain whatever the size of a gather."""


def trained(pipeline, codegen, steps=2, target="mi300x", **options):
    """Returns the losses of all steps, and the trained shards.

    Eager graphs pad and cast. With Inductor, the model consists only of matrix products, so no
    kernel is compiled.
    """
    import torch.distributed as dist

    import zpasses

    torch._dynamo.reset()
    torch.manual_seed(0)
    rows, dtype = (33, torch.bfloat16) if codegen == "eager" else (32, torch.float32)
    model = nn.Sequential(*(nn.Linear(rows, rows, bias=False) for _ in range(3)))
    zpasses.shard(model, mesh=world_mesh(), param_dtype=dtype, reduce_dtype=torch.float32)
    step = torch.compile(
        model,
        backend="zpasses",
        options={"pipeline": pipeline, "codegen": codegen, "target": target, **options},
    )
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for number in range(steps):
        data = torch.randn(
            4, rows, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())
        ).to(dtype)
        loss = step(data).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, [param.to_local().detach().clone() for param in model.parameters()]


FORMS = {"inductor": (SINGLE, COALESCED), "eager": (SINGLE, COALESCED, FLAT)}


def differing(codegen):
    """Returns the forms that did not train like functional gathers of single parameters, and the
    number of mori calls of each form.
    """
    wrong, calls = [], {}
    losses, params = trained(SINGLE, codegen)  # buckets change no bit of it either
    for pipeline in FORMS[codegen]:
        for name, fake in (
            ("mori", Settings(latency_s=0.001)),
            ("c10d", Settings(architecture="gfx90a")),
        ):
            if name == "c10d" and (codegen, pipeline) != ("eager", COALESCED):
                continue
            with installed(fake):
                swapped_losses, swapped_params = trained(pipeline + REPLACE_GATHERS, codegen)
            same = losses == swapped_losses and all(
                torch.equal(a, b) for a, b in zip(params, swapped_params, strict=True)
            )
            if not same:
                wrong.append((pipeline, name))
            assert fake.blocking == 0
            calls[pipeline, name] = len(fake.calls)
    return wrong, calls


@pytest.mark.processes
@pytest.mark.inductor
@pytest.mark.parametrize("codegen", some_quick(FORMS, ["inductor"]))
def test_swapped_training_equals_the_functional_one_bit_for_bit(codegen):
    first, second = run_on_ranks(differing, codegen, timeout_s=280)
    assert first == second
    wrong, calls = first
    assert wrong == []
    trial, forward_gathers = 2, 2 * 3  # of two steps
    for (pipeline, name), count in calls.items():
        if name == "c10d":
            assert count == 0
        elif pipeline == SINGLE:
            assert count > trial + forward_gathers, (pipeline, calls)
        else:
            assert trial < count < trial + forward_gathers, (pipeline, calls)


DEFAULTS = {
    "stage 1": {"zero_stage": 1},
    "stage 2": {"zero_stage": 2},
    "stage 3": {"zero_stage": 3},
    "budget": {"zero_stage": 3, "memory_budget": "10%"},
    "windows": {"zero_stage": 3, "backwards_per_step": 2},
    "blocks": {"zero_stage": 3, "prefetch": "auto"},
}


def by_default(name):
    """Trains with default passes on a target with mori and on one without. Returns whether the
    results are equal, and the number of mori calls.
    """
    plain = trained(None, "inductor", 4, **DEFAULTS[name])
    with installed(Settings(latency_s=0.001)) as fake:
        swapped = trained(None, "inductor", 4, target=GAINING, **DEFAULTS[name])
    same = all(torch.equal(a, b) for a, b in zip(plain[1], swapped[1], strict=True))
    return plain[0] == swapped[0] and same and not fake.blocking, len(fake.calls)


@pytest.mark.processes
@pytest.mark.inductor
@pytest.mark.parametrize("name", some_quick(DEFAULTS, ["stage 3"]))
def test_stages_take_copy_engines_by_default_on_a_target_that_has_them(name):
    first, second = run_on_ranks(by_default, name, timeout_s=280)
    assert first == second
    same, calls = first
    assert same
    trial = 2
    assert calls > trial


def dumping(folder):
    """Runs one step with replaced gathers on a device without copy engines."""
    import torch.distributed as dist

    import zpasses

    torch._dynamo.reset()
    model = zpasses.shard(nn.Linear(32, 32, bias=False), mesh=world_mesh())
    options = {
        "pipeline": SINGLE + REPLACE_GATHERS,
        "codegen": "eager",
        "target": "mi300x",
        "dump": folder,
    }
    with installed(Settings(architecture="gfx90a")):
        torch.compile(model, backend="zpasses", options=options)(torch.ones(2, 32)).sum().backward()
        plain = torch.compile(model, backend="zpasses", options={**options, "pipeline": SINGLE})
        plain(torch.ones(2, 32)).sum().backward()
    return dist.get_rank()


def test_route_chosen_at_run_time_is_in_the_dump(tmp_path):
    # Ranks of the pool may have chosen a route in an earlier test.
    assert all(each.ok for each in run_in_fresh_ranks(dumping, str(tmp_path)))
    replaced, plain = read(tmp_path).ranks[0].compiles
    (note,) = replaced.notes
    assert "on cpu gathers by c10d" in note
    assert "gfx90a" in note
    assert plain.notes == ()  # it has no gather by copy engines
    (shown,) = [
        part.text()
        for part in list_view(read(tmp_path)).parts
        if isinstance(part, Text) and part.text().startswith("at runtime")
    ]
    assert note in shown
