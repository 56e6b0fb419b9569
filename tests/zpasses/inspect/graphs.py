"""Handmade graphs and dumps for tests, without torch."""

import dataclasses
from pathlib import Path

from msgspec import structs

from zpasses.dumps.format import (
    Compile,
    CompileInfo,
    Counts,
    Dump,
    Failure,
    Graph,
    PassRun,
    Rank,
    Step,
)
from zpasses.dumps.nodes import Buffer, Collective, Node, Ref, Snapshot, Source, Tag, Value
from zpasses.inspect import Inspection

MM, GATHER, REDUCE, WAIT = (
    "aten.mm.default",
    "_c10d_functional.all_gather_into_tensor.default",
    "_c10d_functional.reduce_scatter_tensor.default",
    "_c10d_functional.wait_tensor.default",
)


def replace(value, **changes):
    """The dataclass or record with other fields."""
    if dataclasses.is_dataclass(value):
        return dataclasses.replace(value, **changes)
    return structs.replace(value, **changes)


def value(*shape, dtype="float32", device="cpu", width=4):
    count = width
    for size in shape:
        count *= size
    return Value(shape, dtype, device, count)


def node(
    id,
    name,
    target="aten.relu.default",
    args=(),
    *,
    op="call_function",
    shape=(4, 4),
    cost_us=1.0,
    **more,
):
    vals = () if op == "output" else (value(*shape),)
    work = {"cost_us": cost_us, "stream": "compute"} if op == "call_function" else {}
    return Node(id, name, op, target, tuple(args), vals=vals, **{**work, **more})


def placeholder(id, name, shard_of=None):
    """An input, which may be the shard of a parameter."""
    params = () if shard_of is None else (shard_of,)
    tag = None if shard_of is None else Tag("shard", params)
    return node(id, name, name, op="placeholder", params=params, tag=tag)


def output(id, *returned):
    return node(id, "output", "output", (tuple(map(Ref, returned)),), op="output")


def snapshot(*nodes, live=None, number=0):
    live = tuple(live) if live is not None else (0,) * len(nodes)
    return Snapshot(number, tuple(nodes), live, spans(nodes))


def spans(nodes):
    """Kernels one after another, and the collectives of each group beside them."""
    now, free, ends, found = 0.0, {}, {}, []
    for each in nodes:
        start = now
        if (collective := each.collective) is not None:
            start = max(now, free.get(collective.group, 0.0))
            free[collective.group] = start + each.cost_us
            ends |= dict.fromkeys(collective.waits, start + each.cost_us)
            found.append((start, start + each.cost_us))
            if not collective.waits:  # it includes its wait
                now = start + each.cost_us
        else:
            now = max(now, ends.get(each.id, 0.0)) + each.cost_us
            found.append((start, now))
    return tuple(found)


def gather(id, name, shard, wait, *, cost_us=10.0, param="w", buffers=(), **more):
    collective = Collective("all_gather_into_tensor", "0", 2, 32, 64, (wait,), **more)
    about = {"cost_us": cost_us, "stream": "communication", "collective": collective}
    about |= {"params": (param,), "tag": Tag("gather", (param,), 32), "buffers": buffers}
    return node(id, name, GATHER, (Ref(shard), 2, "0"), **about)


def wait(id, name, started, *, param="w"):
    about = {"cost_us": 0.0, "stream": None, "params": (param,), "tag": Tag("full", (param,))}
    return node(id, name, WAIT, (Ref(started),), **about)


def two_gathers(early=False):
    """x @ w @ v. Each parameter is gathered right before its use. With `early`, the second gather
    overlaps with the first product.
    """
    x = placeholder(0, "x")
    shards = [placeholder(1, "w_shard", shard_of="w"), placeholder(2, "v_shard", shard_of="v")]
    first = gather(3, "gather_w", 1, 4, buffers=(full(3, 5, "w"),))
    second = gather(6, "gather_v", 2, 7, param="v", buffers=(full(6, 8, "v"),))
    first_wait, second_wait = wait(4, "w", 3), wait(7, "v", 6, param="v")
    kept = [(Buffer(64, at, at + more, "activation"),) for at, more in ((5, 3), (8, 1))]
    source = Source("model.py", 3, "x = self.up(x)", "layers.0.up")
    product = node(5, "mm", MM, (Ref(0), Ref(4)), cost_us=8.0, source=source, buffers=kept[0])
    last = node(8, "mm_1", MM, (Ref(5), Ref(7)), cost_us=8.0, buffers=kept[1])
    end = output(9, 8)
    middle = (second, product, second_wait) if early else (product, second, second_wait)
    nodes = (x, *shards, first, first_wait, *middle, last, end)
    return snapshot(*nodes, live=alive(nodes))


def gradients(*layers, lines=True):
    """The backward of layers that are equal but for their names: the last one is the first whose
    gradient is reduced.

    Args:
        lines: whether the nodes have lines of the model.
    """
    nodes = [placeholder(0, "tangents_1")]

    def add(name, layer, target, args, **more):
        number = sum(each.name.partition("_")[0] == name for each in nodes)
        source = Source("model.py", 3, f"x = self.{layer}(x)", layer) if lines else None
        full_name = f"{name}_{number}" if number else name
        nodes.append(node(len(nodes), full_name, target, args, source=source, **more))
        return Ref(nodes[-1].id)

    gradient, waits = Ref(0), []
    for layer in reversed(layers):
        own = {"params": (layer,)}
        total = add("sum", layer, "aten.sum.default", (gradient,))
        started = add("reduce", layer, REDUCE, (total,), tag=Tag("reduce", (layer,)), **own)
        waits.append(add("wait", layer, WAIT, (started,), tag=Tag("shard_grad", (layer,)), **own))
        gradient = add("mm", layer, MM, (gradient,))
    nodes.append(node(len(nodes), "output", "output", ((gradient, *waits),), op="output"))
    return snapshot(*nodes)


def retagged(*params):
    """A graph for each tuple of parameters, of a gather that is for these."""
    graphs = []
    for each in params:
        nodes = list(two_gathers().nodes)
        nodes[3] = replace(nodes[3], params=each, tag=replace(nodes[3].tag, params=each))
        graphs.append(snapshot(*nodes))
    return graphs


def full(node, last, param):
    return Buffer(128, node, last, "parameter", (param,))


def alive(nodes):
    """Bytes alive while each node runs, computed from the buffers."""
    at = {each.id: index for index, each in enumerate(nodes)}
    buffers = [buffer for each in nodes for buffer in each.buffers]
    return [
        sum(b.nbytes for b in buffers if at[b.first] <= index <= at[b.last])
        for index in range(len(nodes))
    ]


def chain(count, seed=0):
    """A graph of `count` nodes. Each node reads one or two earlier nodes."""
    nodes = [placeholder(0, "x")]
    for at in range(1, count):
        reads = sorted({(at * 7 + seed) % at, at - 1})
        target = "aten.add.Tensor" if len(reads) > 1 else "aten.relu.default"
        nodes.append(node(at, f"n{at}", target, map(Ref, reads)))
    return snapshot(*nodes, output(count, count - 1))


# --- dumps ----------------------------------------------------------------------------------------
def counts(graph):
    found = [each.collective.nbytes for each in graph.nodes if each.collective]
    return Counts(len(graph.nodes), len(found), sum(found))


def graph_of(name, *states, error=None):
    """A graph and its passes, from pairs of a pass (None first) and the graph after it. The same
    graph twice means that the pass changed nothing.
    """
    steps, graphs = [], {}
    for index, (after, state) in enumerate(states):
        number = run = None
        if state is not None:
            number = next((key for key, known in graphs.items() if known is state), len(graphs))
            graphs[number] = state
        if after and state is not None:
            earlier = states[index - 1][1]
            about = after.partition("{")[0], after, {}, int(state is not earlier), 1500.0, 250.0
            run = PassRun(*about, ("lint", "values"), counts(earlier), counts(state))
        failure = error if after and index == len(states) - 1 else None
        size = None if state is None else counts(state)
        steps.append(Step(index, name, after, number, size, run, failure, graphs.__getitem__))
    return Graph(name, tuple(steps))


def dump_of(*graphs, rank=0, name="0/0", error=None, sources=None, **info):
    """A dump of one compile on one rank."""
    state, given = "failed" if error else "done", {"codegen": "eager", "pipeline": "overlap"}
    about = CompileInfo(name, rank, 2, state, target={"name": "cpu"}, error=error, **given, **info)
    folder, by_name = f"000-{name.replace('/', '_')}", {each.name: each for each in graphs}
    compiled = Compile(folder, Path("dump"), about, (), by_name, sources or {})
    meta = {"zpasses": "0.1.0", "torch": "2.13.0", "created": "2030-01-01T00:00:00Z", "world": 2}
    return Dump(Path("dump"), 1, meta, {rank: Rank(rank, (compiled,))})


def small_dump(**more):
    """Two gathers. `bucket` changes nothing, and `overlap` starts the second gather earlier."""
    before, after = two_gathers(), two_gathers(early=True)
    return dump_of(
        graph_of("forward", (None, before), ("bucket{cap_mb=0}", before), ("overlap", after)),
        **more,
    )


def hostile_dump(text):
    """A failed compile in which all that a page prints is this text."""
    source, failure = Source(text, 1, text, text), Failure(text, text, text, text)
    tag = Tag(text, (text,), origin=text, note=text)
    about = {"tag": tag, "source": source, "params": (text,), "kwargs": {text: text}}
    about |= {"stream": "communication", "cost_us": 5.0}
    about["collective"] = Collective(text, text, 2, 32, 64, (2,), text, text)
    about["buffers"] = (Buffer(64, 1, 2, text, (text,)),)
    started = node(1, text, GATHER, (Ref(0), text), **about)
    ended = node(2, f"{text}2", WAIT, (Ref(1),), source=source)
    first = placeholder(0, text)
    later = snapshot(first, started, ended, live=[0, 64, 64], number=1)
    graph = graph_of("joint", (None, snapshot(first)), (text, later), (text, None), error=failure)
    before, changed, failed = graph.steps
    changed = replace(changed, run=replace(changed.run, notes=(text,)))
    given = {"sources": {text: text}, "options": {text: text, "limit": float("inf")}}
    graph = replace(graph, steps=(before, changed, failed))
    dump = dump_of(graph, name=text, error=failure, **given)
    return Inspection(replace(dump, meta={**dump.meta, "zpasses": text, text: text}))


def two_groups():
    """Two gathers in two process groups, which both start before any compute."""
    by = two_gathers().by_name
    other = replace(by["gather_v"], collective=replace(by["gather_v"].collective, group="1"))
    by["gather_v"] = other
    names = ("x", "w_shard", "v_shard", "gather_w", "gather_v", "w", "mm", "v", "mm_1", "output")
    order = [by[name] for name in names]
    return Inspection(dump_of(graph_of("forward", (None, snapshot(*order, live=alive(order))))))
