"""Graphs, and what the code that Inductor makes of them allocates and calls."""

import torch
from torch._inductor.utils import run_and_get_code

from zpasses import compat
from zpasses.graph.queries import Editor
from zpasses.testing import fake_world

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def read_before_and_after(*, what, room=False):
    """Two kernels read `h`. Between them, products read the first, or a collective is awaited.

    Args:
        what: "products" or "wait".
        room: whether a product at the end takes much more memory.
    """
    graph, mode = torch.fx.Graph(), compat.FakeTensorMode()
    inputs = [graph.placeholder(f"primals_{name}") for name in "hdwb"]
    shapes = [(8, 8), (8, 8), (4, 8) if what == "wait" else (8, 8), (64, 64)]
    with mode:
        for node, shape in zip(inputs, shapes, strict=True):
            node.meta["val"] = torch.empty(shape)
    h, d, w, b = inputs
    output = graph.output(())
    edit = Editor(graph, before=output)
    if what == "products":
        first = edit.call(aten.exp.default, h)
        returned = [edit.call(aten.mm.default, d, first)]
        factor = edit.call(aten.mm.default, d, w)
    else:
        factor = edit.call(c10d.all_gather_into_tensor.default, w, 2, "0")
        returned = [edit.call(aten.exp.default, h)]
        factor = edit.call(c10d.wait_tensor.default, factor)
    returned.append(edit.call(aten.mul.Tensor, h, factor))
    if room:
        returned.append(edit.call(aten.mm.default, b, b))
    output.args = (tuple(returned),)
    return torch.fx.GraphModule({}, graph), [node.meta["val"] for node in inputs]


def code_of(patches, make=read_before_and_after, **graph):
    """The lines of the code after its inputs, with the settings that compiles of zpasses have."""
    ours = dict.fromkeys(
        ("reorder_for_locality", "reorder_for_peak_memory", "allow_buffer_reuse"), False
    )
    patches = {**ours, "force_disable_caches": True, **patches}
    with fake_world(2), torch.no_grad():
        gm, values = make(**graph)

        def run():
            inputs = [torch.ones(*each.shape) for each in values]
            return compat.inductor_codegen_standalone(gm, values, patches)(inputs)

        _, (code,) = run_and_get_code(run)
    return [line.strip() for line in code[code.index("args.clear()") :].splitlines()]


def allocations(code):
    return sum("= empty_strided_cpu(" in line for line in code)


def calls_of(patches, make=read_before_and_after, **graph):
    """The kernels and products of the code, in their order."""
    names = {"cpp_fused": "kernel", "extern_kernels.mm(": "product"}
    starts = [(line, name) for line in code_of(patches, make, **graph) for name in names]
    return [names[name] for line, name in starts if line.startswith(name)]


def built(function, **shapes):
    """A graph that `function` writes, given an editor and its inputs."""
    graph, mode = torch.fx.Graph(), compat.FakeTensorMode()
    inputs = [graph.placeholder(name) for name in shapes]
    with mode:
        for node, shape in zip(inputs, shapes.values(), strict=True):
            node.meta["val"] = torch.empty(shape)
    output = graph.output(())
    output.args = (tuple(function(Editor(graph, before=output).call, *inputs)),)
    return torch.fx.GraphModule({}, graph), [node.meta["val"] for node in inputs]
