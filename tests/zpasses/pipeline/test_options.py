"""Every option changes the graph or the run. Unknown options and bad values raise before anything
is compiled.
"""

import pytest
import torch
import torch.nn as nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import zpasses
from zpasses import OptionError, Options, Pipeline
from zpasses.graph.tags import tagged
from zpasses.pipeline.events import observe_graphs
from zpasses.testing import fake_world


def test_a_stage_chooses_its_named_pipeline_which_may_be_text_or_an_object():
    assert Options.parse(None).passes() == Pipeline.parse("zero3")
    for stage in (1, 2, 3):
        assert Options.parse({"zero_stage": stage}).passes() == Pipeline.parse(f"zero{stage}")
    pipeline = Pipeline.parse("gather-params,reduce-grads{form=all_reduce}")
    for given in (pipeline, str(pipeline)):
        assert Options.parse({"pipeline": given}).passes() == pipeline


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"zero_stag": 3}, "no option 'zero_stag'. Did you mean \"zero_stage\""),
        ({"blocks": "auto"}, "no option 'blocks'; call zpasses.compile_blocks("),
        ({"encode": "int8"}, "pipeline='zero3{gather-params.encode=...}'"),
        ({"chunks": 4}, "names that pass, as chunk-loss{chunks=...}"),
        ({"exchange_rows": "on"}, "'exchange-rows' is written in the option 'pipeline'"),
        ({"pipeline": "chunk-loss,zero3"}, "Give memory_budget, such as '60GiB', or a number of"),
        ({"zero_stage": 4}, "got 4 (int); expected 1 or 2 or 3 or none"),
        ({"zero_stage": True}, "got True (bool); expected 1 or 2 or 3"),
        ({"zero_stage": 3, "pipeline": "zero2"}, "both choose the passes"),
        ({"pipeline": "gather-param"}, "no pass is called 'gather-param'. Did you mean"),
        ({"codegen": "triton"}, "expected 'inductor' or 'eager'"),
        ({"agreement": "perhaps"}, "expected bool"),
        *(({"agreement_timeout_s": float(n)}, "expected seconds > 0") for n in ("0", "inf", "nan")),
        ({"agreement_timeout_s": "soon"}, "expected float"),
        ({"backwards_per_step": 0}, "expected the number of backwards per optimizer step"),
        ({"backwards_per_step": 2.5}, "expected int"),
        ({"grad_accum_dtype": torch.int32}, "expected a floating-point dtype"),
        ({"grad_accum_dtype": "floaty"}, "expected a dtype such as bfloat16"),
        ({"inductor": {"max_autotun": True}}, 'Did you mean "max_autotune"'),
        ({"inductor": 3}, "expected dict"),
    ],
)
def test_bad_options_are_refused_with_the_way_out(given, message):
    with pytest.raises(OptionError) as error:
        Options.parse(given)
    assert message in str(error.value)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).sum()


def graphs_with(options):
    torch._dynamo.reset()
    with fake_world(4):
        model = zpasses.shard(Net(), mesh=init_device_mesh("cpu", (4,)))
        graphs = []
        with observe_graphs(graphs.append):
            torch.compile(model, backend="zpasses", options=options)(torch.ones(3, 8)).backward()
        return {graph.kind: graph.graph for graph in graphs}


def test_bad_options_stop_torch_compile_before_any_graph_is_made():
    graphs, wrong = [], {"codgen": "eager"}
    with fake_world(2), observe_graphs(graphs.append):
        model = zpasses.shard(Net(), mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(Exception, match='Did you mean "codegen"'):
            torch.compile(model, backend="zpasses", options=wrong)(torch.ones(3, 8))
        with pytest.raises(Exception, match="has no modes"):
            torch.compile(Net(), backend="zpasses", mode="max-autotune")(torch.ones(3, 8))
    assert graphs == []


def test_zero_stage_decides_how_long_full_parameters_live():
    def lives(stage):
        graph = graphs_with({"zero_stage": stage, "codegen": "eager"})["forward"]
        tags = [tag for _, tag in tagged(graph, "full")]
        return any(tag.cached for tag in tags), any(tag.kept for tag in tags)

    assert lives(2) == (True, False)  # from call to call
    assert lives(3) == (False, True)  # at most until backward


def test_pipeline_decides_what_is_lowered():
    for pipeline, left in (("", 4), ("gather-params", 0)):
        joint = graphs_with({"pipeline": pipeline, "codegen": "eager"})["joint"]
        assert sum("zpasses.unshard" in str(node.target) for node in joint.nodes) == left


@pytest.mark.slow(quick="test_an_unsharded_model_compiles_to_the_kernels_of_inductor")
def test_codegen_decides_who_runs_the_graph(monkeypatch):
    from zpasses import compat

    called = []
    original = compat.inductor.inductor_codegen
    monkeypatch.setattr(
        compat, "inductor_codegen", lambda *args: called.append("inductor") or original(*args)
    )
    graphs_with({"codegen": "eager"})
    assert called == []
    graphs_with({})
    assert called == ["inductor", "inductor"]


@pytest.mark.inductor
def test_an_unsharded_model_compiles_to_the_kernels_of_inductor():
    """Options for Inductor reach it."""

    def code(**options):
        torch._dynamo.reset()
        torch.manual_seed(0)
        step = torch.compile(Net(), **options)
        codes = run_and_get_code(lambda: step(torch.ones(3, 8)).backward())[1]
        return [text.partition("\n")[2] for text in codes]  # the first line is a counter

    ours = code(backend="zpasses")
    theirs = code(backend="inductor", options={"allow_buffer_reuse": False})
    assert len(theirs) == 2
    assert ours == theirs
    options = {"inductor": {"size_asserts": False}}
    unchecked = code(backend="zpasses", options=options)
    for codes, checks in ((ours, True), (unchecked, False)):
        assert ("assert_size_stride" in codes[0].split("def call")[1]) == checks
