"""Graphs of a dump made by hand, without torch."""

from dataclasses import replace

from zpasses.dumps.format import Buffer, Collective, Node, Ref, Snapshot, Source, Tag, Value, references

MM, GATHER, WAIT = "aten.mm.default", "_c10d_functional.all_gather_into_tensor.default", "_c10d_functional.wait_tensor.default"


def value(*shape, dtype="float32", device="cpu", width=4):
    count = width
    for size in shape:
        count *= size
    return Value(shape, dtype, device, count)


def node(id, name, target="aten.relu.default", args=(), *, op="call_function", shape=(4, 4), cost_us=1.0, **more):
    inputs = tuple(dict.fromkeys(references(tuple(args))))
    vals = () if op == "output" else (value(*shape),)
    work = {"cost_us": cost_us, "stream": "compute"} if op == "call_function" else {}
    return Node(id, name, op, target, tuple(args), vals=vals, inputs=inputs, **{**work, **more})


def snapshot(*nodes, live=None, number=0):
    return Snapshot(number, tuple(nodes), tuple(live) if live is not None else (0,) * len(nodes))


def gather(id, name, shard, wait, *, cost_us=10.0, param="w", **more):
    return node(
        id,
        name,
        GATHER,
        (Ref(shard), 2, "0"),
        cost_us=cost_us,
        stream="communication",
        params=(param,),
        tag=Tag("gather", (param,), 32),
        collective=Collective("all_gather_into_tensor", "0", 2, 32, 64, (wait,), **more),
    )


def wait(id, name, started, *, param="w"):
    return node(id, name, WAIT, (Ref(started),), cost_us=0.0, stream=None, params=(param,), tag=Tag("full", (param,)))


def two_gathers(early=False):
    """x @ w @ v, each parameter gathered where it is read, or (early) the second beside the first product."""
    x, w, v = (node(id, name, name, op="placeholder") for id, name in enumerate(("x", "w_shard", "v_shard")))
    w, v = replace(w, params=("w",), tag=Tag("shard", ("w",))), replace(v, params=("v",), tag=Tag("shard", ("v",)))
    first, first_wait = gather(3, "gather_w", 1, 4), wait(4, "w", 3)
    second, second_wait = gather(6, "gather_v", 2, 7, param="v"), wait(7, "v", 6, param="v")
    source = Source("model.py", 12, "x = self.up(x)", "layers.0.up")
    product = replace(node(5, "mm", MM, (Ref(0), Ref(4)), cost_us=8.0), source=source, buffers=(Buffer(64, 5, 8, "activation"),))
    last = node(8, "mm_1", MM, (Ref(5), Ref(7)), cost_us=8.0)
    end = node(9, "output", "output", ((Ref(8),),), op="output")
    middle = (second, product, second_wait) if early else (product, second, second_wait)
    return snapshot(x, w, v, first, first_wait, *middle, last, end)


def chain(count, seed=0):
    """A graph of `count` nodes, each of which reads one or two of those before it."""
    nodes = [node(0, "x", "x", op="placeholder")]
    for at in range(1, count):
        reads = sorted({(at * 7 + seed) % at, at - 1})
        nodes.append(node(at, f"n{at}", "aten.add.Tensor" if len(reads) > 1 else "aten.relu.default", tuple(Ref(read) for read in reads)))
    nodes.append(node(count, "output", "output", ((Ref(count - 1),),), op="output"))
    return snapshot(*nodes)
