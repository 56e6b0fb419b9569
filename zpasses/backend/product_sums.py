"""Matrix products with a sum that Inductor computes with them, as one value for all plans.

Before                                   After
  product = mm(a, b)                       total = addmm(x, a, b)
  total = add(x, product)

Inductor makes the same of a forward or backward graph, but only if nothing else reads the product,
such as the output of a forward that saves it. `addmm` rounds once and `add` twice, so what a plan
saves would change bits.
"""

from __future__ import annotations

import torch
from torch import fx

from zpasses import compat
from zpasses.cost.time.fused_kernels import product_in
from zpasses.graph.queries import Editor, replace_node

aten = torch.ops.aten


def join_product_sums(joint: fx.Graph) -> None:
    """Joins products with sums in a joint graph whose common subexpressions are merged."""
    for total in joint.find_nodes(op="call_function", target=aten.add.Tensor):
        product = product_in(total)
        term = next((each for each in total.args if each is not product), None)
        if product is None or term is None:
            continue
        policy = compat.recompute_policy(product)
        saved = policy is not None and "save" in policy[0]
        edit = Editor(joint, total, like=product if saved else total)
        replace_node(total, edit.call(aten.addmm.default, term, *product.args))
        joint.erase_node(product)
