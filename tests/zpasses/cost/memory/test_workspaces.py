"""What attention, convolutions and products take within a call."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile, record_function

from tests.zpasses.cost.memory.allocations import allocated
from zpasses.cost.memory.liveness import liveness
from zpasses.cost.memory.workspaces import workspace_bytes
from zpasses.cost.time.fused_kernels import use_fusion
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


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mask", [None, (True, True, False), (True, False, False)])
@pytest.mark.parametrize(
    ("channels", "image", "kernel", "stride"),
    [
        (8, (16,), (5,), 1),
        (8, (32, 32), (3, 3), 1),
        (80, (16, 16), (3, 5), 2),
        (8, (16, 16), (1, 1), 2),
        (81, (16, 16), (3, 3), 1),
        (8, (16, 16, 16), (3, 3, 3), 2),
        (8, (16, 16, 16), (1, 1, 1), 1),
    ],
)
def test_a_convolution_of_one_small_image_is_a_product(
    channels, image, kernel, stride, mask, threads
):
    """Torch makes columns of it; from more than 20480 elements on, oneDNN does without."""
    layout = {"memory_format": torch.channels_last if len(image) == 2 else torch.contiguous_format}
    data = torch.randn(1, channels, *image).to(**layout)
    weight = torch.randn(16, channels, *kernel).to(**layout)
    padding = [size // 2 for size in kernel]
    ones = [1] * len(image)
    settings = None, [stride] * len(image), padding, ones, False, [0] * len(image), 1
    function, inputs = aten.convolution, (data, weight)
    if mask is not None:
        gradient = torch.randn_like(function(*inputs, *settings))
        function, inputs = aten.convolution_backward, (gradient, *inputs)
        settings = (*settings, mask)
    run = lambda *given: function(*given, *settings)  # noqa: E731
    assert 0 <= counted_and_taken(run, inputs, threads) <= 20 << 10


def convolution(
    channels, out, kernel, stride=1, *, groups=1, transposed=False, dims=2, size=16, last=True
):
    """The operands of a convolution and its settings. Those of images may be channels last."""
    layout = {"memory_format": torch.channels_last} if dims == 2 and last else {}
    data = torch.randn(4, channels, *[size] * dims).to(**layout)
    sizes = (channels, out) if transposed else (out, channels // groups)
    weight = torch.randn(*sizes, *[kernel] * dims).to(**layout)
    padding = [kernel // 2 if kernel % 2 else 0] * dims
    settings = None, [stride] * dims, padding, [1] * dims, transposed, [0] * dims, groups
    return (data, weight), settings


@pytest.mark.parametrize("mask", [None, (True, True, False), (False, True, False)])
@pytest.mark.parametrize(
    "given",
    [
        convolution(64, 64, 3, 2, size=32),
        convolution(64, 128, 3, 2, size=56),
        convolution(32, 64, 4, 4, size=32),
        convolution(24, 40, 3, size=28),  # channels that fill no block
        convolution(64, 64, 3, groups=64, size=28),
        convolution(64, 64, 7, groups=64, size=28),
        convolution(96, 96, 3, 2, groups=96, size=3),
        convolution(64, 64, 3, groups=64, size=28, last=False),
        convolution(64, 64, 3, 2, groups=64, size=28, last=False),
        convolution(64, 64, 7, groups=64, size=28, last=False),
        convolution(72, 72, 5, 2, groups=72, size=28, last=False),
        convolution(64, 64, 3, groups=32, size=28),
        convolution(3, 192, 16, 16, size=64),
        convolution(128, 64, 2, 2, transposed=True),
        convolution(64, 64, 3, dims=1, size=256),
        convolution(16, 32, 3, dims=3),
        convolution(16, 32, 3, 2, dims=3),
        convolution(64, 64, 5, dims=3, size=2),  # kernels longer than images
        convolution(64, 64, 3, 2, dims=3, size=2),
        convolution(64, 64, 5, dims=3, size=4),
        convolution(32, 16, 2, 2, transposed=True, dims=3, size=8),
    ],
    ids=lambda given: "-".join(
        map(str, (*given[0][1].shape, *given[0][1].stride()[:1], given[1][1][0], given[1][-1]))
    ),
)
def test_convolutions_take_what_the_model_says(given, mask, monkeypatch):
    """Within 3 % of all operands, by strides, groups, layouts and blocks of channels. No operand of
    the backward of a depthwise convolution is copied here.
    """
    monkeypatch.setattr("zpasses.compat.lays_out_backwards", lambda graph: None)
    (data, weight), settings = given
    function, inputs = aten.convolution, (data, weight)
    gradient = torch.randn_like(aten.convolution(data, weight, *settings))
    if mask is not None:
        function, inputs = aten.convolution_backward, (gradient, *inputs)
        settings = (*settings, mask)
    kept = slice(None) if mask is None else [at for at in range(2) if mask[at]]

    def run(*given):
        made = function(*given, *settings)
        return made if mask is None else tuple(made[at] for at in kept)

    most = 0.03 * nbytes([data, weight, gradient])
    with use_fusion(data.dim() == 4 and not data.is_contiguous()):  # as the operands are laid out
        assert abs(counted_and_taken(run, inputs, threads=1)) <= most + (32 << 10)


def test_operators_one_by_one_run_convolutions_as_they_are_laid_out():
    (data, weight), settings = convolution(64, 64, 3)
    inputs = data.contiguous(), weight.contiguous()
    node = call_of(lambda *given: aten.convolution(*given, *settings), inputs)
    with use_fusion(False):
        apart = workspace_bytes(node)
    assert apart > nbytes(data) > 0


@pytest.mark.parametrize("shape", [(0, 4, 8, 8), (4, 4, 8, 8)])
def test_convolutions_that_torch_accepts_are_counted(shape):
    """Of no image, and with one stride for both dimensions."""
    data, weight = torch.randn(*shape), torch.randn(4, 4, 3, 3)
    settings = None, [2], [1], [1], False, [0], 1
    node = call_of(lambda *given: aten.convolution(*given, *settings), (data, weight))
    assert (workspace_bytes(node) > 0) == bool(shape[0])


def test_a_gradient_in_another_layout_is_copied():
    gradient, *others = inputs_of(100, 60, torch.float32)[1]
    copied = call_of(backward, (gradient.contiguous(), *others))
    plain = call_of(backward, (gradient, *others))
    assert workspace_bytes(copied) - workspace_bytes(plain) == nbytes(gradient)


APART = torch.randn(64, 64, 8).permute(2, 0, 1)
"""Matrices whose rows and columns both have gaps."""


@pytest.mark.parametrize(
    ("left", "right", "copies"),
    [
        (APART[0], APART[0].contiguous(), 1),
        (APART[0], APART[0], 2),
        (APART[0].contiguous(), APART[0].contiguous().t(), 0),
        (APART, APART.contiguous(), 1),
        (APART, APART, 2),
        (torch.randn(64).expand(64, 64), APART[0].contiguous(), 1),
    ],
)
def test_products_copy_matrices_without_consecutive_elements(left, right, copies):
    product = aten.bmm if left.dim() == 3 else aten.mm
    assert counted_and_taken(product, (left, right), threads=1) == 0
    node = call_of(product, (left, right))
    assert workspace_bytes(node) == copies * 4 * 64 * 64
    with use_target(Target.parse("h100")):  # cuBLAS wants all of a batch
        assert workspace_bytes(node) == copies * nbytes(left if left.dim() == 3 else APART[0])


def test_products_of_batches_read_kernels_as_they_are_laid_out():
    """Inductor makes a value contiguous for such a product."""
    graph = make_fx(lambda x, y: (x.sin().permute(2, 0, 1)).bmm(y))(
        torch.randn(64, 64, 8), torch.randn(8, 64, 64)
    ).graph
    (product,) = (each for each in graph.nodes if each.target is aten.bmm.default)
    assert workspace_bytes(product) == 0
    with use_fusion(False):
        assert workspace_bytes(product) == 4 * 64 * 64


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
