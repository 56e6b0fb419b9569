"""Encodings of values: what decodes to what, on any block, and the same in generated code."""

import math

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from tests.cases import some_quick
from tests.graphs import drawn_examples
from zpasses import compat
from zpasses.graph.encoding import (
    DECODE,
    DECODE_MEAN,
    ENCODE,
    ENCODE_WITH_FEEDBACK,
    Encoding,
    decode,
    decode_mean,
    encode,
    encode_with_feedback,
    expand_encodings,
)
from zpasses.graph.queries import Editor

FORMATS = ("int8", "fp8", "mxfp8", "nf4", "fp4")
STEP = {"int8": 0.5 / 127, "fp8": 2**-4, "mxfp8": 2**-4, "nf4": 0.152, "fp4": 1 / 6}
"""Largest error of a code, as a share of its value (fp8, mxfp8), or of the largest value of its
block.
"""
F32 = torch.float32

formats = st.sampled_from(FORMATS)
floats = st.floats(
    width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100
)
examples = settings(max_examples=drawn_examples(60), deadline=None)


def rows(elements=floats, most=9):
    shapes = st.tuples(st.integers(1, most), st.integers(1, most))
    return arrays.arrays(np.float32, shapes, elements=elements).map(torch.from_numpy)


def round_trip(value, how, parts=1):
    """What the ranks of a group make of a tensor whose rows they hold in blocks."""
    block = -(-value.shape[0] // parts)
    count = block * math.prod(value.shape[1:])
    shards = [value[rank * block : (rank + 1) * block] for rank in range(parts)]
    records = torch.cat([encode(each, count, 1, how) for each in shards])
    assert len(records) == parts * how.record_bytes(count)
    return decode(records, value.shape, parts, value.dtype, how)


def blocks_of(value, how):
    """The blocks of a tensor as the encoding cuts them, the last one padded with zeros."""
    count = value.numel()
    number = -(-count // how.block)
    width = -(-count // number)
    padded = torch.nn.functional.pad(value.reshape(-1), (0, number * width - count))
    return padded.view(number, width)


@examples
@given(rows(), formats, st.integers(1, 40))
def test_errors_are_those_of_one_rounding(value, name, block):
    how = Encoding(name, block)
    error = (blocks_of(value, how) - blocks_of(round_trip(value, how), how)).abs()
    exact = blocks_of(value, how).abs()
    largest = exact.amax(1, keepdim=True)
    scale = exact if "fp8" in name else largest
    # The least codes of fp8 are multiples of 2**-9, and a scale is at most twice largest / 448.
    allowed = 1.01 * STEP[name] * scale + largest * (2**-9 / 224 if "fp8" in name else 0)
    assert (error <= allowed + 4e-43).all()


@examples
@given(formats, st.integers(1, 40), st.integers(1, 300))
def test_blocks_are_equally_wide_and_records_small(name, block, count):
    how = Encoding(name, block)
    number = -(-count // block)
    assert how.record_bytes(count) % 16 == 0
    assert how.record_bytes(count) < count + number + number * (1 if name == "mxfp8" else 4) + 16
    assert blocks_of(torch.zeros(1, count), how).shape[1] <= block


@pytest.mark.parametrize("name", FORMATS)
def test_default_blocks(name):
    block, share = {"mxfp8": (32, 1.032), "nf4": (64, 0.5625), "fp4": (64, 0.5625)}.get(
        name, (128, 1.032)
    )
    assert str(Encoding.of(name, None)) == f"{name}/{block}"
    assert Encoding.of(name, None).record_bytes(1 << 20) <= share * (1 << 20)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zero_and_the_largest_value_nearly_exact(name):
    how = Encoding(name, 4)
    value = torch.tensor([[0.0, -0.0, 0.0, 0.0, 3.0, 0.0, -1.5, 0.0]])
    got = round_trip(value, how)
    assert (got[value == 0] == 0).all()
    torch.testing.assert_close(got, value, rtol=0, atol=3 * STEP[name])
    assert got[0, 4] == pytest.approx(3.0)


@examples
@given(
    rows(),
    formats,
    st.integers(1, 20),
    st.sampled_from([math.inf, -math.inf, math.nan]),
    st.integers(0, 80),
)
def test_what_is_not_finite_makes_its_block_nan_and_no_other(value, name, block, lost, at):
    how = Encoding(name, block)
    clean, value = round_trip(value, how), value.clone()
    value.view(-1)[at % value.numel()] = lost
    got, finite = blocks_of(round_trip(value, how), how), blocks_of(value, how).isfinite()
    expected = blocks_of(clean, how).masked_fill(~finite.all(1, keepdim=True), math.nan)
    padding = torch.arange(got.numel()).view_as(got) >= value.numel()
    torch.testing.assert_close(
        got.masked_fill(padding, 0),
        expected.masked_fill(padding, 0),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@examples
@given(rows(st.floats(-(2.0**-123), 2.0**-123, width=32, allow_subnormal=True)), formats)
def test_denormals_stay_finite_and_close(value, name):
    got = round_trip(value, Encoding(name, 4))
    largest = float(value.abs().max())
    assert got.isfinite().all()
    assert float((got - value).abs().max()) <= largest * max(2**-3, STEP[name]) + 4e-43


@pytest.mark.parametrize("name", FORMATS)
def test_largest_numbers(name):
    """A value that fp32 cannot hold after rounding is an infinity, as in any cast."""
    value = torch.tensor([[torch.finfo(F32).max, 1.0], [1.7e38, -1.7e38]])
    got = round_trip(value, Encoding(name, 2))
    assert not got.isnan().any()
    torch.testing.assert_close(got[1], value[1], rtol=STEP[name], atol=0)
    assert got[0, 0] >= 3e38


@examples
@given(rows(), formats, st.integers(1, 7), st.integers(1, 20))
def test_ranks_round_like_their_own_rows(value, name, parts, block):
    """Whatever the padding and the ranks without rows, each rank's rows are those it encodes."""
    how = Encoding(name, block)
    size = -(-value.shape[0] // parts)
    got = round_trip(value, how, parts)
    for at in range(0, value.shape[0], size):
        mine = torch.zeros(size, value.shape[1])
        mine[: len(value[at : at + size])] = value[at : at + size]
        expected = round_trip(mine, how)[: len(value[at : at + size])]
        assert torch.equal(got[at : at + size], expected)


def test_an_empty_shard_is_a_record_of_zeros():
    how = Encoding("int8", 4)
    record = encode(torch.zeros(0, 3), 6, 1, how)
    assert decode(record, [2, 3], 1, F32, how).eq(0).all()


@examples
@given(st.lists(rows(most=4).map(lambda each: each[:1, :1]), min_size=1, max_size=5), formats)
def test_a_mean_is_summed_in_order(values, name):
    how, total = Encoding(name, 3), 0.0
    tensors = [each.expand(2, 3).contiguous() for each in values]
    records = torch.cat([encode(each, 9, 1, how) for each in tensors])
    for each in tensors:
        total = total + round_trip(torch.cat([each, torch.zeros(1, 3)]), how)[:2]
    got = decode_mean(records, [2, 3], 9, len(tensors), F32, how)
    assert torch.equal(got, total / len(tensors))


def test_parts_of_one_tensor_are_records_in_order():
    how, value = Encoding("fp8", 8), torch.randn(5, 4)
    both = encode(value, 12, 2, how)
    assert torch.equal(
        both, torch.cat([encode(value[:3], 12, 1, how), encode(value[3:], 12, 1, how)])
    )


@pytest.mark.parametrize("text", ["int4/128", "int8", "int8/0", "int8/x", "", "int8/8/x"])
def test_other_text_is_no_encoding(text):
    with pytest.raises(ValueError, match="expected a format of int8, fp8, mxfp8"):
        Encoding.parse(text)


# --- error feedback -------------------------------------------------------------------------------
def plain_rounding(block, name):
    """What a block decodes to, written out; NaN if it is not finite."""
    if not block.isfinite().all():
        return torch.full_like(block, math.nan)
    most = 127.0 if name == "int8" else 448.0
    scale = block.abs().max() / most
    scaled = (block / (scale if scale > 0 else 1.0)).clamp(-most, most)
    codes = scaled.round() if name == "int8" else scaled.to(torch.float8_e4m3fn).to(F32)
    return codes * scale


values_and_losses = st.one_of(floats, st.sampled_from([0.0, -0.0, math.inf, -math.inf, math.nan]))


@examples
@given(
    st.lists(rows(values_and_losses), min_size=1, max_size=4),
    st.sampled_from(["int8", "fp8"]),
    st.integers(1, 40),
    st.integers(1, 7),
)
def test_feedback_keeps_what_rounding_loses(values, name, block, parts):
    """Of any gradients one after another: odd blocks, one row, ranks without rows."""
    shape, how = values[0].shape, Encoding(name, block)
    count = -(-shape[0] // parts) * shape[1]
    residual = torch.zeros(how.residual_shape(count, parts))
    lost = residual.clone()
    for each in values:
        value = torch.zeros(shape)  # of the first one's shape
        value.view(-1)[: each.numel()] = each.reshape(-1)[: value.numel()]
        padded = torch.nn.functional.pad(value.reshape(-1), (0, parts * count - value.numel()))
        total = lost + torch.stack([blocks_of(part, how) for part in padded.view(parts, count)])
        records = encode_with_feedback(value, residual, count, parts, how)
        sent = torch.stack([plain_rounding(row, name) for row in total.flatten(0, 1)])
        sent = sent.view(total.shape)
        lost = torch.where((total - sent).isfinite(), total - sent, 0.0)
        assert torch.equal(residual, lost)
        got = decode(records, [parts, count], parts, F32, how)
        wanted = sent.reshape(parts, -1)[:, :count]
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_without_a_residual_feedback_changes_nothing(name):
    how, value = Encoding(name, 8), torch.randn(5, 4)
    zeros = torch.zeros(how.residual_shape(12, 2))
    expected = encode(value, 12, 2, how)
    assert torch.equal(encode_with_feedback(value, zeros, 12, 2, how), expected)
    assert torch.equal(encode(value, 12, 2, Encoding(name, 8, feedback=True)), expected)
    assert not torch.equal(encode_with_feedback(value, zeros, 12, 2, how), expected)


@pytest.mark.parametrize("text", ["int8/128", "fp8/16/feedback"])
def test_text_of_an_encoding(text):
    assert str(Encoding.parse(text)) == text
    assert Encoding.parse(text).feedback == text.endswith("feedback")


# --- generated code -------------------------------------------------------------------------------
def graph_of(make, *sources):
    """A graph that returns what `make` inserts."""
    graph, mode = fx.Graph(), FakeTensorMode()
    places = [graph.placeholder(f"source_{number}") for number, _ in enumerate(sources)]
    for place, source in zip(places, sources, strict=True):
        place.meta["val"] = mode.from_tensor(source)
    output = graph.output(places[0])
    output.args = ((make(Editor(graph, before=output), *places),),)
    return fx.GraphModule(torch.nn.Module(), graph)


CASES = [(name, *each) for name in FORMATS for each in ((7, 5, 3, 4), (64, 50, 2, 64))]


@pytest.mark.parametrize(("name", "high", "wide", "parts", "block"), some_quick(CASES, [CASES[5]]))
def test_generated_code_has_the_same_bits(name, high, wide, parts, block):
    _has_the_same_bits(name, high, wide, parts, block)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "high", "wide", "parts", "block"), CASES)
def test_generated_code_has_the_same_bits_on_a_gpu(name, high, wide, parts, block):
    _has_the_same_bits(name, high, wide, parts, block, "cuda")


def _has_the_same_bits(name, high, wide, parts, block, device="cpu"):
    how, size = Encoding(name, block), -(-high // parts)
    generator = torch.Generator().manual_seed(high)
    value = torch.randn(high, wide, generator=generator) * torch.logspace(-40, 30, high)[:, None]
    value[0, 0], value[-1, -1] = math.inf, math.nan
    value = value.to(device)

    def encodes(edit, at):
        return edit.call(ENCODE, at, size * wide, parts, str(how))

    def decodes(edit, at):
        full = edit.call(DECODE, at, [high, wide], parts, torch.bfloat16, str(how))
        return edit.call(torch.ops.aten.slice.Tensor, full, 0, 0, max(1, high // 3))

    def averages(edit, at):
        return edit.call(DECODE_MEAN, at, [size, wide], size * wide, parts, F32, str(how))

    records = encode(value, size * wide, parts, how)
    for make, source in ((encodes, value), (decodes, records), (averages, records)):
        gm = graph_of(make, source)
        expanded = expand_encodings(gm)
        assert not any("zpasses" in str(node.target) for node in expanded.graph.nodes)
        (ours,), (theirs,) = torch.compile(expanded)(source), gm(source)
        # Triton multiplies and adds in one rounding, so sums differ in the last bit.
        rtol = 3e-7 if make is averages and device != "cpu" else 0
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.slow(quick="test_feedback_keeps_what_rounding_loses")
@pytest.mark.parametrize(
    ("name", "high", "wide", "parts", "block"), [("int8", 64, 64, 2, 128), ("fp8", 7, 5, 3, 4)]
)
def test_generated_code_writes_residuals_in_place(name, high, wide, parts, block):
    how, size = Encoding(name, block), -(-high // parts)
    generator = torch.Generator().manual_seed(high)
    residual = torch.zeros(how.residual_shape(size * wide, parts))
    values = torch.randn(3, high, wide, generator=generator, dtype=torch.bfloat16)
    values *= torch.logspace(-40, 30, high)[:, None]
    values[1, 0, 0] = math.inf

    def encodes(edit, at, kept):
        return edit.call(ENCODE_WITH_FEEDBACK, at, kept, size * wide, parts, str(how))

    gm = graph_of(encodes, values[0], residual)
    expanded, ours = expand_encodings(gm), residual.clone()
    assert not any("zpasses" in str(node.target) for node in expanded.graph.nodes)
    inputs = [node.meta["val"] for node in expanded.graph.find_nodes(op="placeholder")]
    code = compat.inductor_codegen_standalone(expanded, inputs, {})
    for value in values:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            records = code([value, ours])[0]
        assert torch.equal(records, gm(value, residual)[0])
        assert torch.equal(ours, residual)
    assert ours.any()
    events = profiled.profiler.kineto_results.events()
    allocated = [each.nbytes() for each in events if each.name() == "[memory]"]
    total = sum(each for each in allocated if each > 0)
    assert total > 0
    if block == 128:
        assert total < residual.nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("name", "high", "wide", "parts", "block"), [("int8", 64, 64, 2, 128), ("fp8", 7, 5, 3, 4)]
)
def test_generated_code_leaves_nearly_the_same_residuals_on_a_gpu(name, high, wide, parts, block):
    how, size = Encoding(name, block), -(-high // parts)
    draw = torch.Generator().manual_seed(high)
    residual = torch.zeros(how.residual_shape(size * wide, parts), device="cuda")

    def encodes(edit, at, kept):
        return edit.call(ENCODE_WITH_FEEDBACK, at, kept, size * wide, parts, str(how))

    gm = graph_of(encodes, torch.zeros(high, wide, device="cuda"), residual)
    code = torch.compile(expand_encodings(gm))
    for number in range(3):
        value, ours = (
            (torch.randn(high, wide, generator=draw) * 10**number).cuda(),
            residual.clone(),
        )
        assert torch.equal(code(value, ours)[0], gm(value, residual)[0])
        # Triton multiplies and adds in one rounding.
        torch.testing.assert_close(ours, residual, rtol=1e-5, atol=1e-6 * 10**number)
    assert ours.any()


def test_graphs_without_encodings_are_left_alone():
    gm = fx.symbolic_trace(lambda x: x + 1)
    assert expand_encodings(gm) is gm
