"""Trains a model by SGD on simulated ranks, on the graphs that zpasses compiles for them."""

import torch

from zpasses.graph.dialect import UNSHARD
from zpasses.graph.tags import tag_of
from zpasses.runtime.backward_variants import BackwardVariant, build_backward_variant
from zpasses.runtime.grad_slots import grad_slots
from zpasses.runtime.layout import layout_of, rows_of
from zpasses.testing import simulate


class SimulatedTraining:
    """The training of one model on all ranks of a mesh.

    Args:
        captures: what `capture_ranks` returns for a model that returns its loss.
        shards: per rank: name of a parameter -> its local shard as the graph takes it, the cut
            dimension first. Steps change the shards.
        buffers: the model's buffers.
        scales: `scales_of` the sharded model.
    """

    def __init__(self, captures, shards, buffers, scales):
        self._captures, self._shards, self._buffers = captures, shards, list(buffers)
        self._scales = scales
        self._groups = {name: ranks for each in captures for name, ranks in each.groups.items()}
        joint = captures[0].before.joint
        self._names = [self._name(joint, node) for node in _primals(joint)]
        assert sorted(filter(None, self._names)) == sorted(shards[0])
        every = frozenset(range(len(grad_slots(captures[0].after.backward.graph))))
        self._first = self._variant(deferred=every)
        self._middle = self._variant(given=every, deferred=every)
        self._last = self._variant(given=every)

    @staticmethod
    def _name(joint, placeholder):
        reads = [node for node in placeholder.users if node.target is UNSHARD]
        views = [user for node in placeholder.users for user in node.users]
        reads += [node for node in views if node.target is UNSHARD]
        return tag_of(reads[0]).params[0] if reads else None

    def _variant(self, **choices):
        variant = BackwardVariant(**choices)
        backwards = [each.after.backward for each in self._captures]
        return [build_backward_variant(graph, variant)[0] for graph in backwards]

    def backward(self, tokens, scale, pending, last):
        """One forward and backward of every rank.

        Args:
            tokens: one tensor per rank.
            scale: of the loss.
            pending: full gradients that earlier backwards of the window deferred; None for none.
            last: whether this backward reduces.

        Returns:
            The loss of each rank, and what is pending, or the gradients: per rank, by name.
        """
        joint = self._captures[0].before.joint
        inputs = [self._inputs(joint, rank, each) for rank, each in enumerate(tokens)]
        forwards = [each.after.forward for each in self._captures]
        runs = simulate(forwards, [list(each) for each in inputs], self._groups)
        losses = [run.outputs[0] for run in runs]
        given = [
            [*run.outputs[1:], losses[0].new_full((), scale), *(pending[rank] if pending else [])]
            for rank, run in enumerate(runs)
        ]
        if last:
            graphs = self._last if pending else [each.after.backward for each in self._captures]
        else:
            graphs = self._middle if pending else self._first
        done = simulate(graphs, given, self._groups)
        own = len(self._names)
        if last:
            return losses, [self._gradients(run.outputs) for run in done]
        return losses, pending or [run.outputs[own:] for run in done]

    def step(self, gradients, rate):
        for shards, grads in zip(self._shards, gradients, strict=True):
            for name, grad in grads.items():
                shards[name].sub_(grad, alpha=rate)

    def _gradients(self, outputs):
        pairs = zip(self._names, outputs[: len(self._names)], strict=True)
        return {name: grad * self._scales[name] for name, grad in pairs if name is not None}

    def _inputs(self, joint, rank, tokens):
        values = []
        for node, name in zip(_primals(joint), self._names, strict=True):
            fake = node.meta["val"]
            if name is not None:
                values.append(self._shards[rank][name])
            elif not isinstance(fake, torch.Tensor):
                assert not node.users  # a device mesh
                values.append(None)
            elif fake.shape == tokens.shape and fake.dtype == tokens.dtype:
                values.append(tokens)
            else:
                first, *others = [
                    each
                    for each in self._buffers
                    if each.shape == fake.shape and each.dtype == fake.dtype
                ]
                assert all(torch.equal(each, first) for each in others)
                values.append(first)
        return values


def _primals(joint):
    return [
        node
        for node in joint.graph.nodes
        if node.op == "placeholder" and "tangents" not in node.name
    ]


def shards_of(model, places, whole):
    """Name of each parameter of a sharded model -> its shard, as graphs take it.

    Args:
        model: sharded in a fake world, where tensor parallelism scatters no values.
        places: `places_of` the model.
        whole: name -> whole parameter.
    """
    return {
        name: whole[name].detach().reshape(-1)[places[name]].view(rows_of(param).shape)
        for name, param in model.named_parameters()
    }


def places_of(model):
    """Name of each parameter of a sharded model -> place in the flattened whole parameter of each
    element of its shard.
    """
    places = {}
    for name, param in model.named_parameters():
        layout = layout_of(param)
        numbers = torch.arange(param.numel()).view(param.shape)
        places[name] = layout.rows_first(layout.local_part(numbers)).reshape(-1)
    return places


def scales_of(model):
    """Name of each parameter of a sharded model -> what its gradient is multiplied by after the
    graph, which averages over the ranks that share the parameter.
    """
    return {name: layout_of(param).grad_scale for name, param in model.named_parameters()}


def joined(values, places, name, like):
    """The whole tensor of which each rank has a part. Ranks that have the same part must be equal.

    Args:
        values: per rank: name -> its part.
        places: `places_of` each rank.
        name: of the parameter.
        like: the whole parameter.
    """
    whole = torch.full((like.numel(),), float("nan"), dtype=like.dtype)
    for own, place in zip(values, places, strict=True):
        whole[place[name]] = own[name].reshape(-1)
    for own, place in zip(values, places, strict=True):
        assert torch.equal(whole[place[name]], own[name].reshape(-1)), name
    return whole.view(like.shape)
