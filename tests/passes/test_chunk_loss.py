"""The pass `chunk-loss`, by itself and under a memory budget."""

import logging
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import zpasses
from tests.on_ranks import needs, on_ranks
from zpasses import MemoryBudgetError, OptionError, Pipeline
from zpasses.cost.memory.liveness import liveness
from zpasses.graph.queries import numel, value_of
from zpasses.graph.tags import tagged
from zpasses.passes import ChunkLoss
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import capture_graphs, fake_world, world_mesh

BF16 = {"param_dtype": torch.bfloat16}


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
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def batch(vocab=64, seq=6):
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, vocab, (2, 2, seq), generator=generator)
    labels[0, 1] = labels[1, 2] = -100
    return tokens, labels


def test_listing(capture_step, listing_snapshot):
    model = Model(vocab=10)
    step = capture_step(model, batch(10), world_size=2, pipeline="chunk-loss{chunks=2}", shard=BF16)
    joint = step.after.joint
    listing_snapshot(joint)
    listing_snapshot(joint.rows_0, "forward")
    listing_snapshot(joint.rows_2, "backward")


def test_steps_on_simulated_ranks_equal_those_with_all_logits():
    pipeline, options = "chunk-loss{chunks=3},zero3", {"verify": "simulate"}
    step = capture_graphs(
        Model(tied=True), batch(), world_size=2, pipeline=pipeline, shard=BF16, options=options
    )
    assert step.records[0].changes == 1


@pytest.mark.slow(quick="test_steps_on_simulated_ranks_equal_those_with_all_logits")
def test_the_head_is_gathered_once_for_all_chunks_and_its_gradient_reduced_once():
    step = capture_graphs(
        Model(), batch(), world_size=2, pipeline="chunk-loss{chunks=6},zero3", shard=BF16
    )
    for gm, role in [(step.after.forward, "gather"), (step.after.backward, "reduce")]:
        found = [tag.params for _, tag in tagged(gm.graph, role)]
        assert sum("head.weight" in params for params in found) == 1
        assert all(numel(value_of(node)) < 12 * 64 for node in gm.graph.nodes)


@pytest.mark.slow(quick="test_steps_on_simulated_ranks_equal_those_with_all_logits")
def test_auto_without_a_budget_and_one_chunk_leave_graphs_alone():
    for chunks in ("auto", 1):
        passes = Pipeline((ChunkLoss(chunks), *Pipeline.parse("zero3")))
        step = capture_graphs(Model(), batch(), world_size=2, pipeline=passes)
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
    assert any("computes the loss in" in text for text in caplog.messages)
    with fake_world(2):
        for gm in (step.after.forward, step.after.backward):
            assert liveness(gm.graph).peak_bytes <= 7 << 20


@pytest.mark.slow(quick="test_steps_on_simulated_ranks_equal_those_with_all_logits")
def test_a_budget_that_suffices_takes_no_chunks():
    wide = [budgeted(text, "1GiB").after.forward for text in ("chunk-loss,zero3", "zero3")]
    assert str(wide[0].graph) == str(wide[1].graph)


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


def trained(pipeline):
    """Loss, gradients and the widest value of a step with default options."""
    torch.manual_seed(0)
    model = zpasses.shard(Model(vocab=512, width=16), mesh=world_mesh())
    step = torch.compile(model, backend="zpasses", options={"pipeline": pipeline})
    widest = 0

    def observe(log):
        nonlocal widest
        if log.kind in ("forward", "backward"):
            sizes = (numel(value_of(node)) for node in log.graph.nodes)
            widest = max(widest, *sizes)

    with observe_graphs(observe):
        loss = step(*batch(512, seq=128))
        loss.backward()
    torch._dynamo.reset()
    grads = [param.grad.full_tensor() for param in model.parameters()]
    return [loss.detach(), *grads], widest


@pytest.mark.inductor
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
@pytest.mark.slow(quick="test_steps_on_simulated_ranks_equal_those_with_all_logits")
@on_ranks(2, timeout_s=600)
def test_generated_code_on_real_ranks(stage):
    expected, widest = trained(stage)
    found, narrower = trained(f"chunk-loss{{chunks=8}},{stage}")
    assert widest >= 256 * 512
    assert narrower < 256 * 512 / 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * float(other.abs().max()))
