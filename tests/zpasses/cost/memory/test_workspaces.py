"""What attention and convolutions take within a call."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile, record_function

from tests.zpasses.cost.memory.allocations import allocated
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.memory.workspaces import workspace_bytes
from zpasses.cost.time.target import Target, use_target
from zpasses.graph.queries import nbytes, value_of

aten = torch.ops.aten


def forward(query, key, value):
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True)


def backward(gradient, query, key, value, result, sums):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, key, value, result, sums, 0.0, True
    )


def inputs_of(rows, columns, dtype, *, heads=4, key_heads=4, head=16):
    """The inputs of forward and of backward."""
    query = torch.randn(2, heads, rows, head, dtype=dtype)
    key, value = (torch.randn(2, key_heads, columns, head, dtype=dtype) for _ in range(2))
    every = (torch.repeat_interleave(each, heads // key_heads, 1) for each in (key, value))
    gradient = torch.randn(2, rows, heads, head, dtype=dtype).transpose(1, 2)
    return (query, key, value), (gradient, query, key, value, *forward(query, *every))


def call_of(function, inputs):
    graph = make_fx(function)(*inputs).graph
    return next(each for each in graph.nodes if each.op == "call_function")


def counted_and_taken(function, inputs, threads):
    """Bytes of a call by the model, less those that it allocates."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with (
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
            record_function("call"),
        ):
            outputs = function(*inputs)
        node = call_of(function, inputs)
        counted = nbytes(value_of(node)) + workspace_bytes(node)
    finally:
        torch.set_num_threads(before)
    del outputs
    return counted - allocated(profiled, "call")[1]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("function", "rows", "columns", "dtype"),
    [
        (forward, 100, 60, torch.float32),
        (forward, 200, 800, torch.bfloat16),  # the products of backward take memory themselves
        (forward, 800, 400, torch.float64),
        (backward, 100, 60, torch.float32),
        (backward, 200, 800, torch.float64),
        (backward, 800, 400, torch.float32),
    ],
)
def test_attention_takes_what_the_model_says(function, rows, columns, dtype, threads):
    inputs = inputs_of(rows, columns, dtype)[function is backward]
    # Each thread of backward has a row of sums, and only that of the first is profiled.
    unseen = (threads - 1) * min(rows, 256) * dtype.itemsize if function is backward else 0
    assert 0 <= counted_and_taken(function, inputs, threads) <= unseen


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mask", [None, (True, True, False), (True, False, False)])
@pytest.mark.parametrize("channels", [64, 128])
def test_convolutions_take_copies_of_their_weight(channels, mask, threads):
    layout = {"memory_format": torch.channels_last}
    data = torch.randn(4, 64, 16, 16).to(**layout)
    weight = torch.randn(channels, 64, 3, 3).to(**layout)
    settings = None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    function, inputs = aten.convolution, (data, weight)
    if mask is not None:
        gradient = torch.randn(4, channels, 16, 16).to(**layout)
        function, inputs = aten.convolution_backward, (gradient, *inputs)
        settings = (*settings, mask)
    run = lambda *given: function(*given, *settings)  # noqa: E731
    assert 0 <= counted_and_taken(run, inputs, threads) <= 16 << 10


def test_a_gradient_in_another_layout_is_copied():
    gradient, *others = inputs_of(100, 60, torch.float32)[1]
    copied = call_of(backward, (gradient.contiguous(), *others))
    plain = call_of(backward, (gradient, *others))
    assert workspace_bytes(copied) - workspace_bytes(plain) == nbytes(gradient)


@pytest.mark.parametrize(
    ("target", "key_heads", "bytes_in_backward"),
    [
        ("cpu", 4, None),
        # Sums of rows and gradients of queries in fp32, for 256 rows and 32 elements of a head.
        ("h100", 4, 4 * 2 * 4 * 256 * (1 + 32)),
        # Two gradients for each of four heads, in bf16, beside those of two heads.
        ("h100", 2, 4 * 2 * 4 * 256 * (1 + 32) + 2 * 2 * 4 * 200 * 16 * 2),
        ("mi300x", 4, 4 * 2 * 4 * 256),
    ],
)
def test_what_attention_takes_depends_on_the_target(target, key_heads, bytes_in_backward):
    first, second = inputs_of(200, 200, torch.bfloat16, key_heads=key_heads)
    every = (first[0], *(torch.repeat_interleave(each, 4 // key_heads, 1) for each in first[1:]))
    node = call_of(forward, every)
    with use_target(Target.parse(target)):
        assert (workspace_bytes(node) > 0) == (target == "cpu")
        if target != "cpu":
            node = call_of(backward, second)
            assert workspace_bytes(node) == bytes_in_backward
            assert liveness(node.graph).peak_bytes == nbytes(value_of(node)) + bytes_in_backward
