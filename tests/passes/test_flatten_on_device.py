import logging
import math
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.flattening import (
    CUDA,
    DISTRIBUTED,
    PLAIN,
    TIERS,
    assert_same_flat,
    flatten,
    host_as_device,
    move,
    numbered,
    on_host,
    padded,
    rewritten,
    trace,
    two_tensors,
)
from tests.graphs import expect_listing, few_examples
from zpasses import AgreementError, OptionError, PassError
from zpasses.cost.memory import device_memory
from zpasses.graph.queries import calls, collectives
from zpasses.graph.tags import tagged
from zpasses.passes import FlattenOnDevice
from zpasses.passes.writers.flatten_patterns import find_flattenings
from zpasses.pipeline.events import observe_graphs
from zpasses.ranks.vote import vote_timeout
from zpasses.testing import assert_deterministic, copy_graph, fake_world, listing, run_on_ranks


def host_concatenations(gm):
    """Returns the concatenations that are still on the host."""
    found = calls(gm.graph, torch.ops.aten.cat.default)
    return [node for node in found if node.meta["val"].device.type == "cpu"]


def choices(gm):
    """The tier of each flat buffer, and its reason."""
    notes = [tag.note for _, tag in tagged(gm.graph, "flat") if tag.note]
    return [tuple(note.split(": ", 1)) for note in notes]


def choice(gm):
    (made,) = choices(gm)
    return made


# --- listings -------------------------------------------------------------------------------------


def test_plain_moves_what_is_on_the_host_and_concatenates_on_the_device():
    expect_listing(
        listing(rewritten(two_tensors(), PLAIN)),
        """\
h_1: f32[2, 3]
d_1: f32[4]
_to_copy_default = _to_copy(h_1, device=cuda:0)                      # f32[2, 3]
_to_copy_default_1 = _to_copy(_to_copy_default, dtype=bf16)          # bf16[2, 3]
view_default = view(_to_copy_default_1, [-1])                        # bf16[6]
_to_copy_default_2 = _to_copy(d_1, dtype=bf16)                       # bf16[4]
full_default = full([2], 0.0, dtype=bf16, device=cuda:0)             # bf16[2]
cat_default = cat([view_default, _to_copy_default_2, full_default])  # bf16[12]; flat: h_1, d_1; plain: requested
return cat_default
""",  # noqa: E501
    )


def test_distributed_moves_a_part_and_gathers_the_rest(listing_snapshot):
    gm = rewritten(two_tensors(), DISTRIBUTED, world_size=2, rank=0)
    listing_snapshot(gm)


# --- equality -------------------------------------------------------------------------------------
def views(a, b, c):
    """Views: rows of a larger tensor, a transposed one, a broadcast one."""
    return move(torch.cat([a[1:3].reshape(-1), b.t().reshape(-1), c.expand(2, 3).reshape(-1)]))


def promoting(a, b):
    return move(torch.cat([a.view(-1), b.view(-1)]), dtype=torch.float64)


def nested(a, b, c):
    inner = torch.nn.functional.pad(torch.cat([a.view(-1), torch.zeros(3)]), (0, 1), value=-0.0)
    parts = [inner, b.view(-1), torch.full((2,), 7.0), c.to(torch.float32).view(-1)]
    return move(torch.cat(parts).view(-1, 1).contiguous())


def several(a, b):
    """One flat buffer per dtype, as mixed-precision trainers have."""
    return move(torch.cat([a.view(-1)] * 2)), move(torch.cat([b.view(-1), b[:1].reshape(-1)]))


def decomposed(a, b):
    """Moves and casts in the form that Inductor's decompositions produce."""
    cast, put = torch.ops.prims.convert_element_type.default, torch.ops.prims.device_put.default
    flat = torch.cat([cast(a, torch.float32).view(-1), b.view(-1)])
    return cast(put(flat, CUDA), torch.bfloat16)


def on_device(*tensors):
    return [(each, "device") for each in tensors]


HALF = numbered(3, 4, dtype=torch.bfloat16)
CASES = {
    "odd sizes": (flatten, [numbered(3, 5), numbered(7), numbered(1, start=50), numbered(2, 2, 2)]),
    "one tensor": (lambda a: move(torch.cat([a.view(-1)])), [numbered(11)]),
    "smaller than the ranks": (flatten, [numbered(1), numbered(1)]),
    "an empty part": (flatten, [numbered(0, 4), numbered(5), numbered(3, 0)]),
    "nothing at all": (lambda a: move(torch.cat([a.view(-1), a.view(-1)])), [numbered(0, 3)]),
    "tied": (lambda a, b: flatten(a, b, a), [numbered(2, 3), numbered(5)]),
    "on the device": (flatten, on_device(numbered(3, 5), numbered(7))),
    "on both": (padded, [numbered(2, 3), (numbered(4), "device")]),
    "not contiguous": (
        flatten,
        [numbered(5, 3).t(), numbered(4, 6)[:, ::2], numbered(1, start=9).expand(4)],
    ),
    "not contiguous on the device": (flatten, on_device(numbered(5, 3).t(), numbered(4))),
    "views": (views, [numbered(4, 3), numbered(2, 5), numbered(3)]),
    "views on the device": (
        lambda *tensors: views(*(move(each, "cpu") for each in tensors)),
        on_device(numbered(4, 3), numbered(2, 5), numbered(3)),
    ),
    "mixed dtypes": (promoting, [HALF, numbered(5, dtype=torch.int32)]),
    "nested": (nested, [numbered(3), numbered(2, 2), HALF]),
    "several": (several, [numbered(3), HALF]),
    "decomposed": (decomposed, [HALF, numbered(5)]),
    "scalars": (flatten, [numbered(1).squeeze(), numbered(1, start=4).squeeze(), numbered(3)]),
}


@pytest.mark.parametrize("tier", ["plain", "distributed"])
@pytest.mark.parametrize("case", CASES)
def test_flat_buffer_is_the_host_form_s_bit_for_bit(case, tier):
    fn, tensors = CASES[case]
    gm = trace(fn, tensors)
    for world_size in (1, 3, 7) if tier == "distributed" else (1,):
        for graph in assert_same_flat(gm, TIERS[tier], tensors, world_size):
            assert not host_concatenations(graph)
            assert not find_flattenings(graph.graph)


SHAPES = st.one_of(
    st.just(()), st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 5), st.integers(1, 4))
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64])
KINDS = st.sampled_from(["as it is", "transposed", "strided", "on the device"])


@few_examples
@given(
    st.lists(st.tuples(SHAPES, DTYPES, KINDS, st.integers(0, 3)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(sorted(TIERS)),
    st.integers(0, 4),
)
def test_random_lists_are_flattened_as_on_the_host(drawn, world_size, tier, padding):
    tensors = []
    for i, (shape, dtype, kind, _) in enumerate(drawn):
        tensor = numbered(*shape, dtype=dtype, start=10 * i)
        if kind == "transposed" and tensor.dim() == 2:
            tensor = tensor.t()
        if kind == "strided" and tensor.dim():
            tensor = numbered(2 * shape[0], *shape[1:], dtype=dtype)[::2]
        tensors.append((tensor, "device") if kind == "on the device" else tensor)

    def fn(*values):
        parts = []
        for value, (_, _, _, gap) in zip(values, drawn, strict=True):
            on_host = move(value, "cpu") if value.is_cuda else value
            parts += [on_host.reshape(-1), torch.zeros(gap, dtype=value.dtype)]
        return move(torch.nn.functional.pad(torch.cat(parts), (0, padding)))

    for graph in assert_same_flat(trace(fn, tensors), TIERS[tier], tensors, world_size):
        assert not host_concatenations(graph)


def test_a_rank_moves_only_its_own_part_which_is_equal_and_aligned():
    gm = trace(flatten, [numbered(13, dtype=torch.bfloat16)] * 3)
    for rank in range(3):
        graph = rewritten(gm, DISTRIBUTED, 3, rank).graph
        assert [each.shapes for _, each in collectives(graph)] == [((16,),)]
    gm = trace(flatten, [numbered(100), numbered(300)])
    with fake_world(4, 1):
        assert_deterministic(DISTRIBUTED, gm)
    for rank in range(4):
        copies = calls(rewritten(gm, DISTRIBUTED, 4, rank).graph, torch.ops.aten._to_copy.default)
        moved = [node for node in copies if node.kwargs.get("device") == CUDA]
        assert sum(node.meta["val"].numel() for node in moved) == 100


# --- unchanged graphs ---------------------------------------------------------------------------
def _written(a, b):
    flat = torch.cat([a.view(-1), b.view(-1)])
    torch.ops.aten.copy_.default(a, b)
    return move(flat)


def _copied_before_a_write(a, b):
    copied = a.clone()
    torch.ops.aten.copy_.default(a, b)
    return move(torch.cat([copied.view(-1), b.view(-1)]))


def _taken_before_a_write(a, b):
    taken = move(move(a), "cpu").t()
    torch.ops.aten.copy_.default(b, a)
    return move(torch.cat([taken.reshape(-1), b.view(-1)]))


UNCHANGED = {
    "not moved": lambda a, b: torch.cat([a.view(-1), b.view(-1)]),
    "read on the host too": lambda a, b: (
        move(flat := torch.cat([a.view(-1), b.view(-1)])),
        flat.sum(),
    ),
    "not flat": lambda a, b: move(torch.cat([a, b])),
    "one tensor": lambda a, b: move(a.view(-1)),
    "computed after": lambda a, b: move(torch.cat([a.view(-1), b.view(-1)]) * 2),
    "written between": _written,
    "copied before a write": _copied_before_a_write,
    "taken before a write": _taken_before_a_write,
    "on the device already": lambda a, b: torch.cat([move(a).view(-1), move(b).view(-1)]),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_graph_without_a_flattening_for_a_device_is_unchanged(case):
    gm = trace(UNCHANGED[case], [numbered(2, 3), numbered(2, 3)])
    before = listing(gm)
    assert PLAIN.rewrite(gm.graph) == 0
    assert listing(gm) == before


def test_value_computed_on_the_host_is_moved_and_not_recomputed():
    gm = trace(lambda a: move(torch.cat([(a * 2).view(-1), a.view(-1)])), [numbered(2, 3)])
    (graph,) = assert_same_flat(gm, PLAIN, [numbered(2, 3)])
    (product,) = calls(graph.graph, torch.ops.aten.mul.Tensor)
    assert product.meta["val"].device.type == "cpu"


# --- tiers ----------------------------------------------------------------------------------------
MIB = 1 << 20
HOST_TENSORS = [torch.empty(MIB // 4), torch.empty(3 * MIB // 4)]
"""4 MiB in all."""


def free_for(usable_mib):
    """Returns the free bytes of which the pass uses this many MiB, which is nine tenths."""
    return math.ceil(usable_mib * MIB / 0.9)


def flat_of_products(*tensors):
    return flatten(*(tensor * 2 for tensor in tensors))


@pytest.mark.parametrize(
    ("fn", "where", "usable_mib", "tier"),
    # Four ranks. Tensors on the host: `plain` needs the pieces and the buffer; `distributed` needs
    # the part of 1 MiB and the gathered buffer.
    [(flatten, "host", mib, tier) for mib, tier in
     [(8, "plain"), (7.99, "distributed"), (5, "distributed"), (4.99, "host")]]
    # Tensors on the device: `plain` needs the buffer; `distributed` needs only its part if the
    # tensors are freed before the buffer is gathered.
    + [(flat_of_products, "device", mib, tier) for mib, tier in
       [(4, "plain"), (3.99, "distributed"), (1, "distributed"), (0.99, "host")]]
    + [(flatten, "device", 3.99, "host")],
)  # fmt: skip
def test_tier_is_the_first_that_fits(fn, where, usable_mib, tier):
    auto = FlattenOnDevice(group="0", replicated=True, free_bytes=free_for(usable_mib))
    tensors = on_device(*HOST_TENSORS) if where == "device" else HOST_TENSORS
    made, reason = choice(rewritten(trace(fn, tensors), auto, 4, 0))
    assert made == tier
    if where != "device":
        assert reason.startswith("plain needs 8 MiB, distributed needs 5 MiB; ")


def test_buffers_of_one_graph_share_the_memory():
    gm = trace(lambda a, b: (flatten(a, b), flatten(b, a)), HOST_TENSORS)
    graph = rewritten(gm, FlattenOnDevice(free_bytes=10 * MIB))
    assert [tier for tier, _ in choices(graph)] == ["plain", "host"]


def test_without_replicated_values_nothing_is_gathered():
    auto = FlattenOnDevice(group="0", free_bytes=7 * MIB)
    graph = rewritten(trace(flatten, HOST_TENSORS), auto, 4, 0)
    assert choice(graph)[0] == "host"
    assert not list(collectives(graph.graph))


def test_free_memory_of_the_device_is_queried(monkeypatch):
    """If it is unknown, the host form stays."""
    asked = []
    monkeypatch.setattr(device_memory, "free_bytes", lambda each: asked.append(each) or 100 * MIB)
    assert choice(rewritten(trace(flatten, HOST_TENSORS), FlattenOnDevice()))[0] == "plain"
    assert asked == [CUDA]
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: None)
    graph = rewritten(trace(flatten, HOST_TENSORS), FlattenOnDevice())
    assert choice(graph)[0] == "host"
    assert "the free memory of cuda:0 is unknown; set free_bytes=..." in choice(graph)[1]
    assert "host: the free memory of" in listing(graph)


def test_tier_and_reason_are_logged(caplog):
    with caplog.at_level(logging.INFO, logger="zpasses"):
        gm = rewritten(trace(flatten, HOST_TENSORS), FlattenOnDevice(free_bytes=MIB))
    (message,) = caplog.messages
    assert message.startswith(
        "flatten-on-device: float32[1048576] of 2 tensors flattened as host: plain needs 8 MiB; "
        "921.6 KiB of 1 MiB free are usable"
    )
    # The host form is not planned again.
    assert choice(rewritten(gm, FlattenOnDevice(free_bytes=100 * MIB)))[0] == "host"


def test_free_memory_of_the_host_is_that_of_the_machine():
    free = device_memory.free_bytes(torch.device("cpu"))
    assert free is not None
    assert MIB < free < 1 << 50
    assert device_memory.free_bytes(torch.device("meta")) is None


def test_wrong_groups_are_refused():
    with pytest.raises(OptionError, match=r"tier=distributed .* Set group=... to name the ranks"):
        FlattenOnDevice(tier="distributed", group="0")
    gm = trace(flatten, HOST_TENSORS)
    with pytest.raises(PassError, match=r"this process has no process group '7'. Known: '0'"):
        rewritten(gm, FlattenOnDevice(group="7"), 2)
    with pytest.raises(PassError, match=r"Known: none; call torch\.distributed\.init_process"):
        FlattenOnDevice(group="0")(gm.graph)


# --- in a compile ---------------------------------------------------------------------------------
class Flattens(torch.nn.Module):
    """Uses its weight and a flat copy of it on the device. The host stands in for the device."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(numbered(3, 4))
        self.frozen = torch.nn.Parameter(numbered(4), requires_grad=False)

    def forward(self, x):
        flat = torch._utils._flatten_dense_tensors([self.weight, self.frozen]).to("cpu", copy=True)
        return (flat[:12].view(3, 4) @ x).sum() + (flat[12:] * x).sum()


@pytest.mark.parametrize("tier", ["plain", "host"])
def test_gradients_of_a_compiled_flattening_stay_as_they_were(tier):
    model, reference, x, records = Flattens(), Flattens(), numbered(4), []
    options = {"pipeline": f"flatten-on-device{{tier={tier}}}", "codegen": "eager"}
    compiled = torch.compile(model, backend="zpasses", options=options)
    with host_as_device(), observe_graphs(lambda graph: records.extend(graph.records)):
        assert compiled(x).equal(reference(x))
    compiled(x).backward()
    reference(x).backward()
    assert model.weight.grad.equal(reference.weight.grad)
    assert model.frozen.grad is None
    changes = [record.changes for record in records if record.name == "flatten-on-device"]
    assert changes == [int(tier == "plain")]


# --- the vote -------------------------------------------------------------------------------------
def _votes():
    """Runs many votes on real ranks that see different amounts of free memory."""
    rank, seen = dist.get_rank(), []
    gm, values = trace(flatten, HOST_TENSORS), [numbered(MIB // 4), numbered(3 * MIB // 4)]
    for free_mib in [(20, 20), (20, 7), (7, 20), (20, 1), (7, 7)]:
        copied, mine = copy_graph(gm), free_mib[rank] * MIB
        with patch.object(device_memory, "free_bytes", lambda _, mine=mine: mine):
            FlattenOnDevice(group="0", replicated=True)(copied.graph)
        seen.append(choice(copied))
        assert torch.equal(on_host(copied)(*values), torch.cat(values))
    different = r"rank 0 is at .*float32\[8\], but rank 1 at .*float32\[9\]"
    with pytest.raises(AgreementError, match=different):
        FlattenOnDevice(group="0")(trace(flatten, [torch.empty(4), torch.empty(4 + rank)]).graph)
    _compiles_on_one_rank(rank)
    dist.barrier()
    if rank == 1:
        dist.barrier()  # rank 0 has given up by then, and rank 1 gets an error
    missing = r"rank 1 of group '0'.* did not reach .* within 1 s"
    with pytest.raises(AgreementError, match=missing), vote_timeout(1.0):
        FlattenOnDevice(group="0")(copy_graph(gm).graph)
    if rank == 0:
        dist.barrier()
    assert FlattenOnDevice().uuid() == FlattenOnDevice().uuid()
    return seen, FlattenOnDevice().uuid(), PLAIN.uuid()


def _compiles_on_one_rank(rank):
    """Inside a compile, the answer to a repeated question is remembered."""
    options = {"pipeline": "flatten-on-device{group=0}", "codegen": "eager"}
    options |= {"agreement_timeout_s": 20.0}
    for _ in range(1 + rank):
        torch._dynamo.reset()
        with torch.no_grad():  # the backend refuses to train an unsharded model on several ranks
            compiled = torch.compile(Flattens(), backend="zpasses", options=options)
            with host_as_device():
                assert compiled(numbered(4)).equal(Flattens()(numbered(4)))


@pytest.mark.processes
def test_real_ranks_with_different_memory_take_the_same_tier():
    (ours, auto, plain), (theirs, other_auto, other_plain) = run_on_ranks(_votes)
    assert ours == theirs
    # A decision by free memory is not shared between processes.
    assert auto != other_auto
    assert plain == other_plain
    assert [(tier, reason.partition(":")[0]) for tier, reason in ours] == [
        ("plain", "rank 0"),
        ("distributed", "rank 1"),
        ("distributed", "rank 0"),
        ("host", "rank 1"),
        ("distributed", "rank 0"),
    ]


# --- on a real device -----------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_plain_needs_no_more_memory_than_planned():
    tensors = [torch.randn(1 << 20), torch.randn(1 << 18, 5).t(), torch.randn(3)]
    expected = torch.cat([tensor.reshape(-1) for tensor in tensors])
    gm = trace(flatten, tensors)
    PLAIN(gm.graph)
    gm.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    gm.recompile()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    flat = gm(list(tensors))
    assert flat.is_cuda
    assert flat.cpu().equal(expected)
    assert torch.cuda.max_memory_allocated() - before <= 2 * flat.nbytes + MIB
    assert device_memory.free_bytes(flat.device) > 0
