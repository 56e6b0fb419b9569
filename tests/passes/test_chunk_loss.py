"""The pass `chunk-loss`, by itself and under a memory budget."""

import contextlib
import logging
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zpasses
from tests.on_ranks import needs, on_ranks
from zpasses import MemoryBudgetError, OptionError, Pipeline, compat
from zpasses.cost.memory.liveness import liveness
from zpasses.graph.queries import numel, value_of
from zpasses.graph.tags import tagged
from zpasses.passes import ChunkLoss
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import capture_graphs, fake_world, world_mesh

BF16 = {"param_dtype": torch.bfloat16}
KEEPS_NOTHING = (
    "merge-reads{max_hold_mb=1},gather-params,reduce-grads,reshard-after-forward{keep=nothing},"
    "schedule"
)
"""Stage 3, with a second gather of each parameter that backward reads."""


class Model(nn.Module):
    """A head over a vocabulary that is large beside the hidden states."""

    def __init__(self, vocab=64, width=4, tied=False):
        super().__init__()
        self.embed, self.proj = nn.Embedding(vocab, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocab, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        logits = self.head(self.proj(self.embed(tokens)).tanh())
        return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


def batch(vocab=64, seq=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = torch.randint(0, vocab, (2, 2, seq), generator=generator)
    labels[0, 1] = labels[1, 2] = -100
    return tokens, labels


def test_listing(capture_step, listing_snapshot):
    """Of rows without a batch dimension, whose views differ between versions of torch."""
    rows = [each.flatten() for each in batch(10)]
    for gradients, bodies in [("forward", ["rows_0"]), ("backward", ["rows_0", "rows_2"])]:
        step = capture_step(
            Model(vocab=10),
            rows,
            world_size=2,
            pipeline=f"chunk-loss{{chunks=2,gradients={gradients}}}",
            shard=BF16,
        )
        joint = step.after.joint
        listing_snapshot(joint, gradients)
        for each in bodies:
            listing_snapshot(getattr(joint, each), f"{gradients}_{each}")


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_steps_on_simulated_ranks_equal_those_with_all_logits(gradients):
    pipeline = f"chunk-loss{{chunks=3,gradients={gradients}}},zero3"
    step = capture_graphs(
        Model(tied=True),
        batch(),
        world_size=2,
        pipeline=pipeline,
        shard=BF16,
        options={"verify": "simulate"},
    )
    assert step.records[0].changes == 1


@pytest.mark.slow(quick="test_steps_on_simulated_ranks_equal_those_with_all_logits")
@pytest.mark.parametrize(("gradients", "gathers"), [("forward", 0), ("backward", 1)])
def test_the_head_is_gathered_once_for_all_chunks_and_its_gradient_reduced_once(gradients, gathers):
    pipeline = f"chunk-loss{{chunks=6,gradients={gradients}}},{KEEPS_NOTHING}"
    step = capture_graphs(Model(), batch(), world_size=2, pipeline=pipeline, shard=BF16)
    for gm, role, times in [
        (step.after.forward, "gather", 1),
        (step.after.backward, "gather", gathers),
        (step.after.backward, "reduce", 1),
    ]:
        found = [tag.params for _, tag in tagged(gm.graph, role)]
        assert sum("head.weight" in params for params in found) == times
        assert any(found)
        assert all(numel(value_of(node)) < 12 * 64 for node in gm.graph.nodes)


def test_one_chunk_leaves_graphs_alone():
    step = capture_graphs(Model(), batch(), world_size=2, pipeline="chunk-loss{chunks=1},zero3")
    assert step.records[0].changes == 0
    assert str(ChunkLoss()) == "chunk-loss"
    with pytest.raises(OptionError, match="got 0; expected 1 or more"):
        Pipeline.parse("chunk-loss{chunks=0}")


def test_a_graph_without_a_head_says_so(caplog):
    with caplog.at_level(logging.INFO, "zpasses"):
        capture_graphs(
            nn.Linear(4, 4), (torch.ones(2, 4),), world_size=2, pipeline="chunk-loss{chunks=2}"
        )
    assert "chunk-loss: no product whose rows become wider and are then reduced" in caplog.messages


def test_gradients_in_backward_say_why(caplog):
    class Losses(Model):
        def forward(self, tokens, labels):
            logits = self.head(self.proj(self.embed(tokens))).flatten(0, 1)
            return F.cross_entropy(logits, labels.flatten()), logits.logsumexp(-1).mean()

    with caplog.at_level(logging.INFO, "zpasses"):
        capture_graphs(Losses(), batch(), world_size=2, pipeline="chunk-loss{chunks=2},zero3")
    assert "because they depend on the gradients of 2 results" in caplog.text


# --- under a budget -------------------------------------------------------------------------------
@cache
def budgeted(pipeline, budget):
    options = {"target": "h100", "memory_budget": budget}
    model, inputs = Model(vocab=4096, width=16), batch(4096, seq=256)
    return capture_graphs(model, inputs, world_size=2, pipeline=pipeline, options=options)


@pytest.mark.slow(quick="test_steps_on_simulated_ranks_equal_those_with_all_logits")
def test_a_budget_below_the_logits_takes_chunks_if_they_are_allowed(caplog):
    budget = "7MiB"  # fp32 logits take 8 MiB
    with pytest.raises(Exception, match=MemoryBudgetError.__name__):
        budgeted("zero3", budget)
    with caplog.at_level(logging.INFO, "zpasses"):
        step = budgeted("chunk-loss,zero3", budget)
    assert any("computes the loss in" in text and "chunks of" in text for text in caplog.messages)
    late = budgeted("chunk-loss{gradients=backward},zero3", budget).after.backward
    for gm, called in [(step.after.backward, False), (late, True)]:
        assert any(map(compat.is_subgraph_call, gm.graph.nodes)) == called
    with fake_world(2):
        for gm in (step.after.forward, step.after.backward):
            assert liveness(gm.graph).peak_bytes <= 7 << 20


@pytest.mark.slow(quick="test_steps_on_simulated_ranks_equal_those_with_all_logits")
def test_a_budget_that_suffices_takes_no_chunks():
    wide = [budgeted(text, "1GiB").after.forward for text in ("chunk-loss,zero3", "zero3")]
    assert str(wide[0].graph) == str(wide[1].graph)


@pytest.mark.parametrize(
    ("stage", "width", "budget", "chunks"),
    [
        ("zero3", 16, "7MiB", 4),
        ("zero3", 16, "3MiB", 8),
        ("zero3", 16, "1GiB", 0),
        ("zero3", 16, "0%", 0),
        ("zero3", 64, "10MiB", 2),
        ("zero2", 64, "10MiB", 4),  # the embedding, 1 MiB, stays
    ],
)
def test_an_evaluation_takes_the_fewest_chunks_that_fit(stage, width, budget, chunks):
    """As many as fit a step are not needed, because nothing is saved."""
    inputs, graphs = batch(4096, seq=256), []
    with fake_world(2) as mesh:
        model = zpasses.shard(Model(vocab=4096, width=width), mesh=mesh)
        options = {
            "pipeline": f"chunk-loss,{stage}",
            "memory_budget": budget,
            "codegen": "eager",
            "agreement": False,
        }
        step = torch.compile(model, backend="zpasses", options=options)
        with torch.no_grad(), observe_graphs(graphs.append):
            step(*inputs)
        graph = graphs[-1].graph
        called = sum(map(compat.is_subgraph_call, graph.nodes))
        assert called == chunks
        assert graphs[-1].kind == "inference"
        if budget.endswith("MiB"):
            assert liveness(graph).peak_bytes <= int(budget.removesuffix("MiB")) << 20


# --- models ---------------------------------------------------------------------------------------
@needs("transformers")
@pytest.mark.slow(quick="test_steps_on_simulated_ranks_equal_those_with_all_logits")
def test_the_loss_of_a_transformers_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 96}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "use_cache": False}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(input_ids=tokens, labels=tokens).loss

    pipeline, options = "chunk-loss{chunks=3},zero3", {"verify": "simulate"}
    tokens = batch(96)[0]
    step = capture_graphs(Loss(), (tokens,), world_size=2, pipeline=pipeline, options=options)
    assert step.records[0].changes == 1
    assert not any(map(compat.is_subgraph_call, step.after.backward.graph.nodes))


def trained(pipeline):
    """Losses and gradients of a window of two micro-batches with default options, or of the plain
    model, and the widest value of the graphs.
    """
    torch.manual_seed(0)
    model = Model(vocab=512, width=16)
    widest = 0

    def observe(log):
        nonlocal widest
        if log.kind in ("forward", "backward"):
            sizes = (numel(value_of(node)) for node in log.graph.nodes)
            widest = max(widest, *sizes)

    if pipeline is None:
        step, window = model, contextlib.nullcontext()
    else:
        zpasses.shard(model, mesh=world_mesh())
        step = torch.compile(model, backend="zpasses", options={"pipeline": pipeline})
        window = zpasses.coalesce_grad_reduction(model)
    found = []
    with observe_graphs(observe), window:
        for seed in range(2):
            loss = step(*batch(512, seq=128, seed=seed))
            (loss / 3).backward()
            found.append(loss.detach())
    torch._dynamo.reset()
    grads = [param.grad for param in model.parameters()]
    return [*found, *(each if pipeline is None else each.full_tensor() for each in grads)], widest


@pytest.mark.inductor
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.slow(quick="test_steps_on_simulated_ranks_equal_those_with_all_logits")
@on_ranks(2, timeout_s=600)
def test_generated_code_on_real_ranks(stage):
    expected, _ = trained(None)
    _, widest = trained(stage)
    assert widest >= 256 * 512
    for options in ("chunks=8", "chunks=8,gradients=backward"):
        found, narrower = trained(f"chunk-loss{{{options}}},{stage}")
        assert narrower < 256 * 512 / 4
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * float(other.abs().max()))


@pytest.mark.inductor
@pytest.mark.slow(quick="test_steps_on_simulated_ranks_equal_those_with_all_logits")
def test_generated_code_of_mixed_precision(caplog):
    """bf16 autocast, and a gradient of the loss that bf16 does not hold."""

    def grads(pipeline):
        torch.manual_seed(0)
        model = Model(vocab=512, width=16)
        step = torch.compile(model, backend="zpasses", options={"pipeline": pipeline})
        with torch.autocast("cpu", torch.bfloat16):
            loss = step(*batch(512, seq=128))
        loss.backward(torch.tensor(1 / 3))
        return [loss.detach(), *(param.grad for param in model.parameters())]

    expected = grads("zero3")
    with caplog.at_level(logging.INFO, "zpasses"):
        found = grads("chunk-loss{chunks=8},zero3")
    assert "in 8 chunks of 32 tokens" in caplog.text
    assert "in backward" not in caplog.text
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02 * float(other.abs().max()))
