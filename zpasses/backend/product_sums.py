"""Sums of a matrix product, which Inductor computes in one `addmm` in some graphs: each plan rounds
them as the plan that saves all does.

Where that plan has one `addmm`             Where it has a product and a sum
  product = mm(a, b)                          product = mm(a, b)
  total = add(x, product)                     total = add(x, product)
becomes                                     becomes
  total = addmm(x, a, b)                      product = mm(a, b)
                                              total = sub(x, product, alpha=-1)

Inductor computes `x + a @ b` as one `addmm` if nothing else reads the product in a graph, such as
the output of a forward that saves it. `addmm` rounds once and `add` twice, so what a plan saves
would change bits. On accelerators, it computes an `addmm` that only elementwise operators read as a
product and a sum, also one of the model. What `sub` computes is equal to the sum, including the
sign of zeros, and no pattern of Inductor matches it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.time.fused_kernels import product_in, products_in
from zpasses.graph.queries import propagate, value_of

aten = torch.ops.aten


def round_as_in(graphs: tuple[fx.GraphModule, fx.GraphModule], joint: fx.Graph) -> bool:
    """Rewrites the sums of a joint graph whose rounding would depend on the partition. They keep
    their names.

    Args:
        graphs: forward and backward of the partition whose roundings all get.
        joint: the joint graph.

    Returns:
        Whether there are any.
    """
    sums = list(_sums(graphs, joint))
    for total, product in sums:
        if product is None:
            total.target, total.kwargs = aten.sub.Tensor, {"alpha": -1}
        elif value_of(product).shape[0] == 1:  # Inductor computes some rows by other operators
            compat.mark_recompute(product)
        else:
            _join(total, product)
    return bool(sums)


def _sums(
    graphs: tuple[fx.GraphModule, fx.GraphModule], joint: fx.Graph
) -> Iterator[tuple[fx.Node, fx.Node | None]]:
    """Yields the sums whose products forward computes, with the product that `addmm` computes with
    a sum in the given graphs; None if none does. Other partitions have the same readers of products
    that only backward computes.
    """
    sides = [
        {node.name: node for node in each.graph.nodes if node.op == "call_function"}
        for each in graphs
    ]
    for total in joint.find_nodes(op="call_function", target=aten.add.Tensor):
        products = {each.name: each for each in products_in(total)}
        if sides[0].keys().isdisjoint(products) or not value_of(total).is_floating_point():
            continue
        joined = {product_in(side[total.name]) for side in sides if total.name in side}
        names = {each and each.name for each in joined}
        if len(names) == 1:  # a checkpoint may have both
            yield total, products.get(names.pop() or "")


def _join(total: fx.Node, product: fx.Node) -> None:
    term = total.args[0] if total.args[1] is product else total.args[1]
    total.target, total.args = aten.addmm.default, (term, *product.args)
    total.meta["val"] = propagate(total)
    if not product.users:
        total.graph.erase_node(product)
