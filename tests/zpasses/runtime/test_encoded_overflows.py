"""Gradients of encoded reductions that are not finite are said once."""

import logging
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zpasses
from tests.on_ranks import on_ranks
from zpasses.graph.encoding import Encoding, decode_mean, encode
from zpasses.runtime.overflows import EncodedGrad, OverflowWatch, encoded_grads
from zpasses.testing import capture_graphs, run_in_fresh_ranks, world_mesh

INT8 = "zero3{reduce-grads.encode=int8,reduce-grads.exact_below_kib=0}"
CODE = [EncodedGrad(1, "layer.weight", "int8/8", 4)]


@pytest.fixture
def said(caplog):
    caplog.set_level(logging.WARNING, "zpasses")
    return lambda: [each.getMessage() for each in caplog.records]


@pytest.mark.parametrize("place", range(40))
def test_one_value_of_any_block_is_enough(place, said):
    grad, how = torch.randn(5, 8), Encoding("int8", 7)
    grad.view(-1)[place] = torch.inf
    mean = decode_mean(encode(grad, 40, 1, how), [5, 8], 40, 1, torch.float32, how)
    watched = [EncodedGrad(1, "layer.weight", str(how), 3)]
    code = OverflowWatch().watching(lambda args: (None, *args), watched, "graph 0/0")
    code([mean])
    code([mean])
    (text,) = said()
    assert text.startswith("graph 0/0: gradients are not finite")
    assert "layer.weight" in text


def test_finite_gradients_and_others_say_nothing(said):
    code = OverflowWatch().watching(lambda args: args, CODE, "graph 0/0")
    lost = torch.full((3,), torch.nan)
    large = torch.full((33,), 3e38)
    for grad in (large, large.double(), large.bfloat16(), None, torch.empty(0), torch.zeros(1, 1)):
        code([lost, grad])
    assert said() == []


def test_an_accelerator_is_not_waited_for(said, monkeypatch):
    done = []
    event = SimpleNamespace(query=lambda: bool(done))
    monkeypatch.setattr("zpasses.runtime.overflows._arrival", lambda device: event)
    code = OverflowWatch().watching(lambda args: (None, *args), CODE, "graph 0/0")
    code([torch.full((8,), torch.nan)])
    code([torch.zeros(8)])
    assert said() == []
    done.append(True)
    code([torch.zeros(8)])
    code([torch.zeros(8)])
    assert len(said()) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_says_it_in_the_next_backward(said):
    code = OverflowWatch().watching(lambda args: (None, *args), CODE, "graph 0/0")
    code([torch.full((8,), torch.nan, device="cuda")])
    torch.cuda.synchronize()
    code([torch.zeros(8, device="cuda")])
    assert len(said()) == 1


def test_only_encoded_gradients_are_watched():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8, bias=False))
    how = {"pipeline": INT8.replace("=0}", "=4}")}
    captured = capture_graphs(model, [torch.randn(4, 64)], world_size=2, **how)
    found = encoded_grads(captured.after.backward.graph)
    assert [(each.param, each.encoding, each.stride) for each in found] == [
        ("0.weight", "int8/128", 64)
    ]
    exact = capture_graphs(model, [torch.randn(4, 64)], world_size=2, pipeline="zero3")
    assert encoded_grads(exact.after.backward.graph) == []


class Texts(logging.Handler):
    """What this rank has said of gradients that are not finite."""

    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        if "not finite" in record.getMessage():
            self.found.append(record.getMessage())


def overflow_of_one_rank(prepare, backwards=1):
    """Returns what is said in three steps. Rank 1 has an infinity from the second one on."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    zpasses.shard(model, mesh=world_mesh())
    step, texts = prepare(model), Texts()
    logging.getLogger("zpasses").addHandler(texts)
    try:
        for number in range(3):
            with zpasses.coalesce_grad_reduction(model) if backwards > 1 else nullcontext():
                for _ in range(backwards):
                    x = torch.randn(4, 64)
                    x[0, 0] = torch.inf if number and dist.get_rank() == 1 else 0.0
                    step(x).sum().backward()
            assert bool(texts.found) == bool(number)
    finally:
        logging.getLogger("zpasses").removeHandler(texts)
    return texts.found


def compiled(model, **options):
    return torch.compile(model, backend="zpasses", options={"pipeline": INT8, **options})


@on_ranks(2)
def test_a_backward_says_whose_gradients_overflowed():
    (text,) = overflow_of_one_rank(partial(compiled, codegen="eager"))
    assert "0.weight, 1.weight." in text
    assert "backward with parameters '0.weight'" in text


@on_ranks(2)
def test_a_backward_in_which_parameters_step_says_it():
    optimizers = []

    def prepare(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        optimizers.append(zpasses.step_in_backward(optimizer))
        step = compiled(model, codegen="eager")

        def run(x):
            optimizer.step()
            optimizer.zero_grad()
            return step(x)

        return run

    (text,) = overflow_of_one_rank(prepare)
    assert "0.weight, 1.weight." in text
    assert "backward with parameters '0.weight'" in text


def _defaults():
    (text,) = overflow_of_one_rank(compiled)
    assert "0.weight, 1.weight." in text


@pytest.mark.inductor
@pytest.mark.slow(quick="test_a_backward_says_whose_gradients_overflowed")
def test_defaults_and_warm_starts_say_it(tmp_path):
    for _ in range(2):
        env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
        outcomes = run_in_fresh_ranks(_defaults, env=env, timeout_s=200)
        assert all(outcome.ok for outcome in outcomes), "\n".join(map(str, outcomes))


@pytest.mark.slow(quick="test_a_backward_says_whose_gradients_overflowed")
@on_ranks(2)
def test_blocks_say_whose_gradients_overflowed_when_these_arrive():
    def blocks(model):
        zpasses.compile_blocks(model, "*", pipeline=INT8, codegen="eager")
        return model

    texts = overflow_of_one_rank(blocks)
    assert all(": weight." in text for text in texts)
    assert any("backward with parameters '0.weight'" in text for text in texts)


@pytest.mark.slow(quick="test_a_backward_says_whose_gradients_overflowed")
@on_ranks(2)
def test_the_end_of_a_window_says_whose_gradients_overflowed():
    (text,) = overflow_of_one_rank(partial(compiled, codegen="eager"), backwards=2)
    assert text.startswith("the end of a window: ")
    assert "0.weight, 1.weight." in text
