"""`reduce-grads{encode=...,feedback=on}`: what graphs encode from step to step."""

import logging

import pytest
import torch

from tests.cases import some_quick
from tests.graphs import Param, before_and_after, declared_and_encoded, expect_listing
from zpasses import OptionError, Pipeline
from zpasses.graph.encoding import DECODE_MEAN, ENCODE, Encoding, decode, encode
from zpasses.graph.error_feedback import add_residual_inputs, residual_bytes, residuals_of
from zpasses.graph.queries import calls
from zpasses.graph.tags import params_of
from zpasses.passes import ReduceGrads
from zpasses.simulate.simulator import simulate
from zpasses.testing import assert_equal_bits, copy_graph, listing, random_inputs

BF16, F32 = torch.bfloat16, torch.float32
FEEDBACK = {"encode": "int8", "block": 32, "exact_below_kib": 0.0, "feedback": "on"}
ODD = [
    Param((7, 20), param_dtype=BF16),
    Param((7, 20), reduce_dtype=F32, reads=2),  # each of its gradients has a residual
    Param((2, 40)),  # no rows on the last of three ranks
    Param((6, 5, 4)),
    Param((9,)),
    Param((0, 30)),
]
TAILS = [
    "schedule{plan=single,mode=coalesced,memory_budget=1GiB}",
    "schedule{plan=single,mode=flat,memory_budget=1GiB}",
    "schedule{plan=one-ahead,cap_mb=0}",
]


def with_feedback(name, tail):
    options = f"encode={name},block=32,exact_below_kib=0,feedback=on"
    return f"gather-params,reduce-grads{{{options}}},{tail}"


def test_residuals_become_inputs_that_encodes_write():
    each = Param((7, 20), param_dtype=BF16)
    *_, after = before_and_after(3, [each], ReduceGrads(**FEEDBACK))[1]
    gm, residuals = add_residual_inputs(after)
    expect_listing(
        listing(gm),
        """\
primals_1: f32[1, 20]                                                                                         # shard: p0
primals_2: bf16[7, 20]
tangents_1: bf16[7, 20]
residual_0: f32[3, 2, 30]
unshard = zpasses.unshard(primals_1, 7, bf16, None, '0')                                                      # bf16[7, 20]; gather: p0
mul = mul(unshard, primals_2)                                                                                 # bf16[7, 20]
mul_1 = mul(tangents_1, primals_2)                                                                            # bf16[7, 20]
encode_with_feedback_default = zpasses.encode_with_feedback(mul_1, residual_0, 60, 3, 'int8/32')              # u8[240]; reduce_input: p0
all_to_all_single_default = all_to_all_single(encode_with_feedback_default, [80, 80, 80], [80, 80, 80], '0')  # u8[240]; reduce: p0
wait_tensor_default = wait_tensor(all_to_all_single_default)                                                  # u8[240]; reduced: p0
decode_mean_default = zpasses.decode_mean(wait_tensor_default, [1, 20], 60, 3, f32, 'int8/32/feedback')       # f32[1, 20]; shard_grad: p0
return [mul, decode_mean_default, None]
""",  # noqa: E501
    )
    assert [(each.param, each.shape) for each in residuals] == [("p0", (3, 2, 30))]
    assert residual_bytes(after.graph) == residuals[0].nbytes == 4 * 180
    assert "residual" not in listing(after)


def test_graphs_without_feedback_stay_as_they_are():
    *_, after = before_and_after(
        2, [Param((7, 20))], ReduceGrads(**{**FEEDBACK, "feedback": "off"})
    )[1]
    assert calls(after.graph, ENCODE)
    assert add_residual_inputs(after) == (after, [])
    assert residual_bytes(after.graph) == 0


@pytest.mark.parametrize("name", some_quick(["int8", "fp8"], ["int8"]))
def test_passes_see_no_residuals(name):
    """The graph equals the dialect, in which residuals are zero, and that without feedback."""
    text = with_feedback(name, TAILS[1])
    before, *after = declared_and_encoded(3, ODD, [text, text.replace(",feedback=on", "")])
    for graphs in after:
        assert_equal_bits(before, graphs, random_inputs(before))


def returning(gm, nodes):
    """A copy of a graph that returns the values of some of its nodes."""
    names, gm = [node.name for node in nodes], copy_graph(gm)
    known = {node.name: node for node in gm.graph.nodes}
    gm.graph.output_node().args = (tuple(known[name] for name in names),)
    gm.recompile()
    return gm


class Reference:
    """Error feedback in plain torch."""

    def __init__(self, name, ranks):
        self.how, self.ranks, self.lost = Encoding(name, 32), ranks, {}

    def reduced(self, number, grads):
        """The rows of each rank, padded, of the mean of one gradient per rank."""
        sent = [self.sent((rank, number), grad) for rank, grad in enumerate(grads)]
        return [sum(each[1:], each[0]) / self.ranks for each in zip(*sent, strict=True)]

    def sent(self, key, grad):
        """What the records of a rank stand for, one per rank."""
        rows = -(-grad.shape[0] // self.ranks)
        total = torch.zeros(self.ranks * rows, *grad.shape[1:])
        total[: grad.shape[0]] = grad
        total += self.lost.get(key, 0.0)
        parts = [
            decode(encode(each, each.numel(), 1, self.how), each.shape, 1, F32, self.how)
            for each in total.chunk(self.ranks)
        ]
        self.lost[key] = total - torch.cat(parts)
        return parts


@pytest.mark.parametrize(
    ("name", "tail"),
    some_quick([(name, tail) for name in ("int8", "fp8") for tail in TAILS], [("int8", TAILS[1])]),
)
def test_steps_of_simulated_ranks_equal_plain_torch(name, tail):
    ranks = 3
    _, lowered = declared_and_encoded(ranks, ODD, [with_feedback(name, tail)])
    encodes = [calls(gm.graph, ENCODE) for gm in lowered]
    params = [params_of(node)[0] for node in encodes[0]]
    assert len(params) == len(set(params)) + 1  # two gradients of one parameter
    probes = [
        returning(gm, [node.args[0] for node in nodes])
        for gm, nodes in zip(lowered, encodes, strict=True)
    ]
    whole = [add_residual_inputs(gm)[0] for gm in lowered]
    means = [in_order(params, calls(gm.graph, DECODE_MEAN)) for gm in whole]
    ours = [returning(gm, nodes) for gm, nodes in zip(whole, means, strict=True)]
    residuals = [[torch.zeros(each.shape) for each in residuals_of(gm.graph)] for gm in lowered]
    reference = Reference(name, ranks)
    for step in range(4):
        inputs = random_inputs(lowered, seed=step, bound=3)
        grads = [run.outputs for run in simulate(probes, inputs)]
        given = [[*each, *held] for each, held in zip(inputs, residuals, strict=True)]
        runs = simulate(ours, given)
        for at in range(len(params)):
            expected = reference.reduced(at, [each[at] for each in grads])
            for run, mean in zip(runs, expected, strict=True):
                assert torch.equal(run.outputs[at], mean[: len(run.outputs[at])])
    assert all(each.any() for each in reference.lost.values())


def in_order(params, nodes):
    """Nodes in the order of the parameters that they work for."""
    by_param = {}
    for node in nodes:
        by_param.setdefault(params_of(node)[0], []).append(node)
    return [by_param[param].pop(0) for param in params]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("feedback=on", "feedback=on without 'encode' has no effect.*or leave feedback out"),
        ("encode=int8,feedback=true", "got 'true'.*expected 'off' or 'on'"),
    ],
)
def test_wrong_options_are_refused(options, said):
    with pytest.raises(OptionError, match=said):
        Pipeline.parse(f"reduce-grads{{{options}}}")


def test_dumps_say_what_feedback_holds(caplog):
    with caplog.at_level(logging.INFO, "zpasses"):
        before_and_after(2, [Param((64, 64)), Param((64, 32))], ReduceGrads(**FEEDBACK))
    assert "holds residuals of 2 parameters, 24 KiB on each rank" in caplog.text
