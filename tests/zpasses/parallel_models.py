"""Small models for device meshes of several dimensions, and their training steps."""

import contextlib
import copy

import torch
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import zpasses


class Block(nn.Module):
    def __init__(self, width=8, hidden=10):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    """Predicts one of 7 words from each. Dimensions that meshes of 2 x 2 do not divide."""

    def __init__(self, words=7, layers=2, hidden=10):
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.blocks = nn.ModuleList(Block(hidden=hidden) for _ in range(layers))
        self.head = nn.Linear(8, words, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallelized(model, mesh, *, sequence=True, loss=False):
    """Applies tensor parallelism: column, row and, with `sequence`, sequence parallelism; with
    `loss`, the logits stay cut.
    """
    inside = Shard(1) if sequence else Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=inside),
        "head": ColwiseParallel(
            input_layouts=inside,
            output_layouts=Shard(-1) if loss else Replicate(),
            use_local_output=not loss,
        ),
    }
    for i in range(len(model.blocks)):
        if sequence:
            plan[f"blocks.{i}.norm"] = SequenceParallel()
        plan[f"blocks.{i}.up"] = ColwiseParallel(input_layouts=inside)
        plan[f"blocks.{i}.down"] = RowwiseParallel(output_layouts=inside)
    return parallelize_module(model, mesh, plan)


def mesh_2d(dp=2, tp=2, names=("dp", "tp")):
    return init_device_mesh("cpu", (dp, tp), mesh_dim_names=names)


def token_batches(steps, ranks, seed=0):
    """Returns tokens [steps, ranks, 3, 6], of which each rank of data parallelism takes one part
    per step.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 7, (steps, ranks, 3, 6), generator=generator)


def word_loss(logits, tokens):
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def train_unsharded(model, batches, loss=word_loss, optimizer=sgd, clip=None):
    """Trains a copy on the batches of all ranks. Returns losses [steps, ranks], the gradients of
    the last step and the parameters after it.
    """
    model = copy.deepcopy(model)
    optim, losses = optimizer(model), []
    for step in batches:
        optim.zero_grad()
        own = [loss(model(part), part) for part in step]
        torch.stack(own).mean().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        losses.append([each.item() for each in own])
        optim.step()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return losses, grads, {name: param.detach() for name, param in model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_near(actual, expected, rtol=1e-6):
    """Asserts equal names, and values within `rtol` of the largest one of each tensor."""
    assert list(actual) == list(expected)
    for name, value in expected.items():
        scale = value.abs().max().item() or 1.0
        torch.testing.assert_close(
            actual[name].detach(),
            value,
            rtol=0,
            atol=rtol * scale,
            msg=lambda s, n=name: f"{n}: {s}",
        )


def assert_trains_as(
    plain,
    model,
    batches,
    own,
    options,
    *,
    windows=1,
    explicit=False,
    clip=None,
    clip_grad_norm_=nn.utils.clip_grad_norm_,
    loss=word_loss,
    mode=contextlib.nullcontext,
    collect=whole,
    rtol=1e-6,
):
    """Trains `model`, a sharded copy of `plain`, and compares losses, gradients and parameters.

    Args:
        batches: parts [steps, windows * ranks, ...], of which this rank trains `own` per window.
        options: compile options; None runs the model without compiling it.
        explicit: reduce in `coalesce_grad_reduction`.
        mode: context of a forward and its backward.
        collect: returns the whole of a parameter or gradient.
    """
    parts = batches.unflatten(1, (windows, -1))[:, :, own]
    losses, grads, params = train_unsharded(plain, batches, clip=clip)
    run, optim, found = model, sgd(model), []
    if options is not None:
        options = {"codegen": "eager", **options}
        run = torch.compile(model, backend="zpasses", options=options, fullgraph=True)
    for step in parts:
        optim.zero_grad()
        with zpasses.coalesce_grad_reduction(model) if explicit else contextlib.nullcontext():
            for part in step:
                with mode():
                    mine = loss(run(part), part)
                    (mine / windows).backward()
                found.append(whole(mine).item())
        if clip is not None:
            clip_grad_norm_(model.parameters(), clip)
        optim.step()
    expected = torch.tensor(losses).unflatten(1, (windows, -1))[:, :, own].flatten()
    torch.testing.assert_close(torch.tensor(found), expected, rtol=2e-6, atol=0)
    ours = dict(model.named_parameters())
    assert_near({name: collect(param.grad) for name, param in ours.items()}, grads, 1e-5)
    assert_near({name: collect(param) for name, param in ours.items()}, params, rtol)


# --- experts --------------------------------------------------------------------------------------
class Experts(nn.Module):
    """Two-layer experts, computed one after the other."""

    def __init__(self, experts, width=8, hidden=6):
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / 3)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / 3)

    def forward(self, tokens):
        """Takes and returns tokens [experts of this rank, tokens, width]."""
        up, down = self.up, self.down
        if isinstance(up, DTensor):
            up, down = up.to_local(), down.to_local()
        parts = [torch.tanh(part @ up[i]) @ down[i] for i, part in enumerate(tokens.unbind())]
        return torch.stack(parts)


class Mixture(nn.Module):
    """Sends every token to the best expert, over `group` if the experts lie on its ranks.

    Every expert has a place for every token, so shapes do not depend on the data.
    """

    def __init__(self, experts=4, width=8):
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width)
        self.group = None

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, -2)
        scores = self.router(x).softmax(-1)
        gate, chosen = scores.max(-1)
        place = nn.functional.one_hot(chosen, scores.shape[1]).to(x.dtype).t()  # [experts, tokens]
        sent = self._exchange(place.unsqueeze(-1) * x)
        pieces = 1 if self.group is None else self.group.size()
        sent = sent.unflatten(0, (pieces, -1)).transpose(0, 1).flatten(1, 2)
        done = self.experts(sent)
        done = done.unflatten(1, (pieces, -1)).transpose(0, 1).flatten(0, 1)
        back = self._exchange(done)
        return ((place.unsqueeze(-1) * back).sum(0) * gate.unsqueeze(-1)).view(shape)

    def _exchange(self, tokens):
        if self.group is None:
            return tokens
        return all_to_all_single_autograd(tokens.contiguous(), None, None, self.group)


class MixtureModel(nn.Module):
    def __init__(self, words=7, layers=2):
        super().__init__()
        self.embed = nn.Embedding(words, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(layers))
        self.layers = nn.ModuleList(Mixture() for _ in range(layers))
        self.head = nn.Linear(8, words)

    def forward(self, tokens):
        x = self.embed(tokens)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x))
        return self.head(x)


def expert_parallel(model, mesh, *, dtensors=True):
    """Leaves each rank its experts, as DTensors on `mesh` or as plain parameters."""
    for layer in model.layers:
        layer.group = mesh.get_group()
        for name, param in list(layer.experts.named_parameters()):
            own = param.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            if dtensors:
                own = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(layer.experts, name, nn.Parameter(own))
    return model
