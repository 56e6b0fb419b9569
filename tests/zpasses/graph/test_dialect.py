import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zpasses
from zpasses.graph.dialect import REDUCE_GRAD, UNSHARD, group_size, rows_per_rank
from zpasses.graph.queries import calls
from zpasses.testing import fake_world, random_inputs, simulate, trace_joint

unshard, reduce_grad = torch.ops.zpasses.unshard, torch.ops.zpasses.reduce_grad
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64


@pytest.fixture
def single_rank_group():
    """A real process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def leaf(*shape, dtype=F32):
    return torch.randn(shape, dtype=dtype).requires_grad_()


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (UNSHARD, lambda: (leaf(4, 2), 4, None, None, "0")),
        (UNSHARD, lambda: (leaf(4), 4, BF16, F32, "0")),
        (UNSHARD, lambda: (leaf(), 0, None, None, "0")),
        (UNSHARD, lambda: (leaf(0, 3), 0, None, None, "0")),
        (REDUCE_GRAD, lambda: (leaf(4, 2), 4, 4, F32, None, "0")),
        (REDUCE_GRAD, lambda: (leaf(4, dtype=BF16), 4, 4, F32, F64, "0")),
        (REDUCE_GRAD, lambda: (leaf(), 0, 0, F32, None, "0")),
        (REDUCE_GRAD, lambda: (leaf(3, 0), 3, 3, F32, None, "0")),
    ],
)
def test_op_passes_opcheck(op, args, single_rank_group):
    torch.library.opcheck(op, args())


def test_sizes_that_depend_on_the_rank_pass_opcheck_in_a_larger_world():
    with fake_world(3, 2):
        checks = ("test_schema", "test_faketensor")
        read = (leaf(1, 2), 7, None, None, "0")
        torch.library.opcheck(UNSHARD, read, test_utils=(*checks, "test_autograd_registration"))
        reduction = (leaf(7, 2), 7, 1, F32, None, "0")
        torch.library.opcheck(REDUCE_GRAD, reduction, test_utils=checks)


def test_a_single_rank_gets_a_copy_of_its_rows(single_rank_group):
    for shard in (leaf(4, 2), leaf(), leaf(0, 3)):
        full = unshard(shard, shard.shape[0] if shard.dim() else 0, None, None, "0")
        assert torch.equal(full, shard)
        assert full.numel() == 0 or full.data_ptr() != shard.data_ptr()


@pytest.mark.parametrize("compiled", [False, True])
def test_sparse_gradient_is_refused(single_rank_group, compiled):
    model = zpasses.shard(nn.Embedding(4, 2), mesh=init_device_mesh("cpu", (1,)))

    def read(words):
        return F.embedding(words, model.weight, sparse=True).sum()

    if compiled:
        read = torch.compile(read, backend="zpasses", options={"codegen": "eager"})
    with pytest.raises(Exception, match=r"sparse_coo.*Set sparse=False"):
        read(torch.tensor([1])).backward()


def test_gradient_has_the_dtype_of_the_shard(single_rank_group):
    shard = leaf(4, 2)
    full = unshard(shard, 4, BF16, F32, "0")
    assert full.dtype == BF16
    full.sum().backward()
    assert shard.grad.dtype == F32
    assert torch.equal(shard.grad, torch.ones(4, 2))


def test_gradcheck_and_gradgradcheck_pass_on_one_rank(single_rank_group):
    shard = leaf(3, 2, dtype=F64)

    def loss(value):
        return unshard(value, 3, None, None, "0").pow(3)

    assert torch.autograd.gradcheck(loss, (shard,))
    assert torch.autograd.gradgradcheck(loss, (shard,))
    assert torch.autograd.gradcheck(
        lambda value: reduce_grad(value, 3, 3, F64, None, "0").pow(2), (shard,)
    )


def test_gradient_is_the_mean_of_the_ranks_gradients():
    def fn(shard, x):
        return unshard(shard, 5, None, None, "0") * x

    graphs = []
    for rank, rows in enumerate((3, 2)):
        with fake_world(2, rank):
            shard = torch.zeros(rows, 2, requires_grad=True)
            graphs.append(trace_joint(fn, [shard, torch.zeros(5, 2)]))
    inputs = random_inputs(graphs)
    runs = simulate(graphs, inputs)
    mean = sum(values[1] * values[2] for values in inputs) / 2
    assert torch.equal(torch.cat([run.outputs[1] for run in runs]), mean)


def test_gradient_of_an_averaged_gradient_is_divided_by_the_group_size():
    """The mean of losses on `reduce_grad(g)` depends on each rank's g through 1/N of it."""
    graphs = []
    for rank in range(2):
        with fake_world(2, rank):
            grad = torch.zeros(4, requires_grad=True)
            graphs.append(trace_joint(lambda g: reduce_grad(g, 4, 2, F32, None, "0") * 2, [grad]))
    tangents = [torch.tensor([2.0, 4.0]), torch.tensor([6.0, 8.0])]
    for run in simulate(graphs, [[torch.zeros(4), tangent] for tangent in tangents]):
        assert run.outputs[1].tolist() == [2, 4, 6, 8]


def test_fake_value_has_the_full_shape_and_the_compute_dtype():
    with fake_world(3, 2):
        gm = trace_joint(
            lambda shard: unshard(shard, 7, BF16, F32, "0") * 2,
            [torch.zeros(1, 5, requires_grad=True)],
        )
    ((read,), (reduction,)) = calls(gm.graph, UNSHARD), calls(gm.graph, REDUCE_GRAD)
    assert (tuple(read.meta["val"].shape), read.meta["val"].dtype) == ((7, 5), BF16)
    assert (tuple(reduction.meta["val"].shape), reduction.meta["val"].dtype) == ((1, 5), F32)


def test_group_size_and_rows():
    with fake_world(3):
        assert group_size("0") == 3
    assert [rows_per_rank(rows, 3) for rows in (0, 1, 3, 4, 7)] == [0, 1, 1, 2, 3]


def test_unknown_group_raises():
    with fake_world(2), pytest.raises((RuntimeError, ValueError), match=r"nowhere"):
        unshard(torch.zeros(2), 4, None, None, "nowhere")
