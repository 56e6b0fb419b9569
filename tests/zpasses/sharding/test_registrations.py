"""What happens to a gathered copy that a program takes for the parameter: registered in modules, by
parametrizations, as a tied weight or as a buffer; with hooks and marks; in optimizers.
"""

import copy
import itertools
import pickle
import warnings

import pytest
import torch
import torch.nn.utils.prune
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.utils import parametrizations, parametrize

import zpasses
from tests.cases import some_quick
from tests.models.families import of_transformers
from tests.on_ranks import needs, on_ranks
from zpasses.testing import world_mesh

pytestmark = pytest.mark.processes


def _net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 7))


def _sharded(model=None, **options):
    return zpasses.shard(_net() if model is None else model, mesh=world_mesh(), **options)


def _compiled(model, stage, codegen="eager"):
    options = {"zero_stage": stage, "codegen": codegen}
    return torch.compile(model, backend="zpasses", options=options) if stage else model


def _data():
    return torch.linspace(-1, 1, 24).view(4, 6)


def _train(run, model, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        run(_data()).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_like(model, plain, **tolerances):
    actual = {name: param.detach().full_tensor() for name, param in model.named_parameters()}
    expected = {name: param.detach() for name, param in plain.named_parameters()}
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, **tolerances)


# --- parametrizations -----------------------------------------------------------------------------
class Half(nn.Module):
    def forward(self, weight):
        return weight.tanh()

    def right_inverse(self, weight):
        return weight * 0.5


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(2, 6)), nn.Parameter(torch.ones(5, 2))

    def forward(self, weight):
        return weight + self.b @ self.a


class RankOne(nn.Module):
    def forward(self, column, row):
        return column[:, None] @ row[None]

    def right_inverse(self, weight):
        return weight[:, 0].clone(), weight[0].clone()


def _two(linear):
    parametrize.register_parametrization(linear, "weight", Half())
    parametrize.register_parametrization(linear, "weight", LowRank())
    parametrize.register_parametrization(linear, "bias", Half())


KINDS = {
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "LoRA": lambda linear: parametrize.register_parametrization(linear, "weight", LowRank()),
    "several": _two,
    "pruning": lambda linear: nn.utils.prune.l1_unstructured(linear, "weight", amount=0.5),
}
OF_SEVERAL_TENSORS = {
    "weight norm": parametrizations.weight_norm,
    "rank one": lambda linear: parametrize.register_parametrization(linear, "weight", RankOne()),
    "old weight norm": lambda linear: nn.utils.weight_norm(linear),
    "old spectral norm": lambda linear: nn.utils.spectral_norm(linear),
}


def _registered(how, model):
    torch.manual_seed(3)
    {**KINDS, **OF_SEVERAL_TENSORS}[how](model[0])
    return model


@pytest.mark.parametrize(
    ("how", "stage", "codegen"),
    some_quick(
        [("several", 3, "inductor"), *itertools.product(KINDS, (0, 2, 3), ["eager"])],
        [("LoRA", 2, "eager")],
    ),
)
@on_ranks(2, timeout_s=300)
def test_parametrizations_after_sharding_train_as_before_it(how, stage, codegen):
    plain, model = _registered(how, _net()), _sharded()
    params = dict(model.named_parameters())
    _registered(how, model)
    if how in ("LoRA", "several"):
        _sharded(model)  # the adapters
    kept = {id(param) for param in model.parameters()}
    assert all(id(param) in kept for param in params.values())
    run = _compiled(model, stage, codegen)
    _train(run, model)
    _train(plain, plain)
    exact = {} if codegen != "eager" else {"rtol": 0, "atol": 0}
    _assert_like(model, plain, **exact)
    model.load_state_dict(copy.deepcopy(plain.state_dict()))
    _assert_like(model, plain, rtol=0, atol=0)
    with zpasses.local_shards(model):
        assert not hasattr(type(model[0]), "_zpasses_specs")
    assert repr(model[0]).startswith(repr(plain[0]).partition("(")[0])
    for each in (model, plain):
        if how == "pruning":
            nn.utils.prune.remove(each[0], "weight")
            continue
        for name in list(each[0].parametrizations):
            parametrize.remove_parametrizations(each[0], name)
    _assert_like(model, plain)
    torch.testing.assert_close(run(_data()), plain(_data()))


@on_ranks(2)
def test_parametrizations_of_several_tensors_are_refused_after_sharding():
    said = r"of parameter 'weight' of a Linear.* before zpasses\.shard"
    for how in OF_SEVERAL_TENSORS:
        with pytest.raises(zpasses.ShardingError, match=said):
            _registered(how, _sharded())


@pytest.mark.parametrize(
    ("how", "stage", "codegen"),
    some_quick(
        [
            ("weight norm", 3, "inductor"),
            *itertools.product(OF_SEVERAL_TENSORS, (2, 3), ["eager"]),
        ],
        [("old spectral norm", 3, "eager")],
    ),
)
@on_ranks(2, timeout_s=300)
def test_parametrizations_of_several_tensors_before_sharding(how, stage, codegen):
    plain, model = _registered(how, _net()), _sharded(_registered(how, _net()))
    _train(_compiled(model, stage, codegen), model)
    _train(plain, plain)
    _assert_like(model, plain)


@pytest.mark.parametrize("bias", [True, False])
@on_ranks(2)
def test_parametrizations_of_before_sharding_are_removed_after_it(bias):
    plain, model = (nn.Linear(6, 5, bias=bias) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    for each in (plain, model):
        parametrize.register_parametrization(each, "weight", Half())
    _sharded(model)
    for each in (plain, model):
        parametrize.remove_parametrizations(each, "weight")
    assert isinstance(model._parameters["weight"], DTensor)
    with zpasses.local_shards(model):
        assert type(model) is nn.Linear
    _assert_like(model, plain)
    _train(model, model)
    _train(plain, plain)
    _assert_like(model, plain)


@on_ranks(2)
def test_pruning_of_before_sharding_is_removed_after_it():
    plain, model = _net(), _net()
    for each in (plain, model):
        for name in ("weight", "bias"):
            nn.utils.prune.l1_unstructured(each[0], name, amount=0.5)
    _sharded(model)
    kept = dict(model.named_parameters())
    for name in ("weight", "bias"):
        for each in (plain, model):
            nn.utils.prune.remove(each[0], name)
        assert model[0].get_parameter(name) is kept[f"0.{name}_orig"]
    _assert_like(model, plain)
    _train(_compiled(model, 3), model)
    _train(plain, plain)
    _assert_like(model, plain)


@pytest.mark.parametrize("how", ["LoRA", "pruning"])
@on_ranks(2)
@pytest.mark.slow(quick="test_parametrizations_after_sharding_train_as_before_it")
def test_windows_follow_parameters_that_a_parametrization_moves(how):
    plain, model = _registered(how, _net()), _registered(how, _sharded())
    if how == "LoRA":
        _sharded(model)
    options = {"codegen": "eager", "zero_stage": 2, "backwards_per_step": 2}
    run = torch.compile(model, backend="zpasses", options=options)
    for each, call in ((plain, plain), (model, run)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for backwards in (2, 1):  # the second step comes early
            for _ in range(backwards):
                call(_data()).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    _assert_like(model, plain)


@on_ranks(2)
def test_values_that_a_parametrization_sets_need_the_dtype_of_the_shards():
    model = _sharded(param_dtype=torch.bfloat16)
    with pytest.raises(zpasses.ShardingError, match=r"before zpasses\.shard"):
        parametrize.register_parametrization(model[0], "weight", Half())
    parametrize.register_parametrization(model[0], "bias", nn.Identity())
    assert model[0].bias.dtype == torch.bfloat16


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 90).view(3, 6, 5))
        self.out = nn.Linear(5, 4)

    def forward(self, x):
        return self.out(torch.einsum("bi,eio->bo", x, self.weight))


@needs("peft")
@on_ranks(2)
@pytest.mark.slow(quick="test_parametrizations_after_sharding_train_as_before_it")
def test_adapters_of_peft_that_parametrize_inside_of_forward():
    import peft

    config = peft.LoraConfig(
        r=2, target_modules=["out"], target_parameters=["1.weight"], init_lora_weights=False
    )

    def adapted():
        torch.manual_seed(0)
        return peft.get_peft_model(nn.Sequential(nn.Identity(), Experts()), config)

    plain, model = adapted(), _sharded(adapted())
    _train(plain, plain, steps=1)
    _train(model, model, steps=1)
    _assert_like(model, plain)
    _train(plain, plain, steps=1)
    _train(_compiled(model, 3), model, steps=1)
    _assert_like(model, plain)
    names = [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    assert all(isinstance(param, DTensor) for param in model.parameters())


# --- tied weights ---------------------------------------------------------------------------------
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.embed(tokens)))


def _tie(model):
    model.head.weight = model.embed.weight


def _tie_new_head(model):
    model.head = nn.Linear(6, 7, bias=False)
    model.head.weight = model.embed.weight


def _tie_without_gradients(model):
    with torch.no_grad():
        _tie_new_head(model)


@pytest.mark.parametrize(
    ("tie", "stage"),
    some_quick(
        itertools.product([_tie, _tie_new_head, _tie_without_gradients], [0, 2, 3]),
        [(_tie, 2), (_tie_new_head, 3), (_tie_without_gradients, 0)],
    ),
)
@on_ranks(2)
def test_assignment_of_a_read_ties_weights(tie, stage):
    plain, model = Words(), _sharded(Words())
    for each in (plain, model):
        tie(each)
    assert model.head._parameters["weight"] is model.embed._parameters["weight"]
    for each, run in ((plain, plain), (model, _compiled(model, stage))):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        for _ in range(2):
            run(torch.arange(7)).pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    _assert_like(model, plain)


@on_ranks(2)
def test_tied_weights_need_equal_layouts():
    model = Words()
    zpasses.shard(model.embed, mesh=world_mesh(), shard_placement_fn=lambda param: Shard(1))
    zpasses.shard(model.head, mesh=world_mesh())
    with pytest.raises(zpasses.ShardingError, match="assigned to 'weight'"):
        _tie(model)


@needs("transformers")
@on_ranks(2)
def test_tie_weights_of_transformers():
    from tests.models.sizes import TOKENS, WIDTHS

    for tied_before in (True, False):
        sizes = {**TOKENS, **WIDTHS, "vocab_size": 33}
        model = of_transformers("LlamaForCausalLM", **sizes, tie_word_embeddings=tied_before)
        _sharded(model)
        model.config.tie_word_embeddings = True
        model.tie_weights()
        tied = model.model.embed_tokens._parameters["weight"]
        assert model.lm_head._parameters["weight"] is tied
        tokens = torch.arange(8).view(1, 8)
        model(tokens, labels=tokens).loss.backward()
        assert tied.grad.full_tensor().abs().sum() > 0


@on_ranks(2)
def test_new_parameters_of_a_copy_are_not_registered():
    model = _sharded(Words())
    made = nn.Parameter(model.embed.weight.T)  # code of PEFT computes with it
    assert made.shape == (6, 7)
    for name in ("weight", "other"):
        said = rf"{name}.*without nn\.Parameter.*clone\(\)"
        with pytest.raises(zpasses.ShardingError, match=said):
            setattr(model.head, name, nn.Parameter(model.embed.weight))
        setattr(model.head, name, nn.Parameter(model.embed.weight.detach().clone()))


@on_ranks(2)
def test_get_parameter_returns_the_parameter_and_a_read_a_copy():
    model = _sharded()
    param = model.get_parameter("0.weight")
    assert param is next(model.parameters())
    assert torch.equal(param.full_tensor(), model[0].weight)
    assert isinstance(model[0].weight, nn.Parameter)
    assert not isinstance(model[0].weight[0], nn.Parameter)


# --- hooks, gradients, optimizers -----------------------------------------------------------------
REFUSED = {
    "register_hook": lambda weight: weight.register_hook(print),
    "register_post_accumulate_grad_hook": (
        lambda weight: weight.register_post_accumulate_grad_hook(print)
    ),
    "retain_grad": lambda weight: weight.retain_grad(),
    "an optimizer": lambda weight: torch.optim.SGD([weight], lr=0.1),
    "a frozen copy": lambda weight: weight.requires_grad_(False),
    "requires_grad": lambda weight: setattr(weight, "requires_grad", False),
}


@on_ranks(2)
def test_what_is_about_the_parameter_is_refused_on_a_copy():
    model = _sharded()
    said = r"parameter 'weight' of a Linear.*with zpasses\.local_shards\(model\)"
    for call in REFUSED.values():
        with pytest.raises(zpasses.ShardingError, match=said):
            call(model[0].weight)


@pytest.mark.parametrize("blocks", [False, True])
@on_ranks(2)
def test_ways_out_for_hooks(blocks):
    model, calls = _sharded(), []
    by_name = dict(model.named_parameters())["0.weight"]
    with zpasses.local_shards(model):
        for param in (by_name, model[0].weight):
            param.register_hook(lambda grad: calls.append(("grad", type(grad))))
            param.register_post_accumulate_grad_hook(lambda param: calls.append("stored"))
        model[2].weight.requires_grad_(False)
    if blocks:
        zpasses.compile_blocks(model, codegen="eager")
    model(_data()).sum().backward()
    assert [call for call in calls if call != "stored"] == [("grad", DTensor)] * 2
    assert calls.count("stored") == 2
    assert dict(model.named_parameters())["2.weight"].grad is None


@on_ranks(2)
def test_requires_grad_that_is_so_already():
    model = _sharded()
    weight = model[0].weight
    assert weight.requires_grad_() is weight
    weight.requires_grad = True
    dict(model.named_parameters())["0.weight"].requires_grad_(False)
    assert model[0].weight.requires_grad_(False).requires_grad is False


@on_ranks(2)
def test_gradients_with_respect_to_another_read():
    model = _sharded()
    with pytest.raises(zpasses.ShardingError, match=r"parameter itself: model\.get_parameter"):
        torch.autograd.grad(model(_data()).sum(), [model[0].weight])
    params = dict(model.named_parameters())
    with pytest.raises(zpasses.ShardingError, match=r"do not depend on it. parameter 'weight'"):
        torch.autograd.grad(
            model(_data()).sum(), [params["0.bias"], model[0].weight], allow_unused=True
        )
    param = params["0.weight"]
    (grad,) = torch.autograd.grad(model(_data()).sum(), [param])
    assert grad.full_tensor().shape == (5, 6)
    weight = model[0].weight  # a read that is used
    (grad,) = torch.autograd.grad((weight * 2).sum(), [weight])
    assert torch.equal(grad, torch.full((5, 6), 2.0))


@pytest.mark.parametrize("compiled", some_quick([False, True], [True]))
@on_ranks(2)
def test_backward_with_respect_to_another_read_raises_at_the_next_step(compiled):
    model = _sharded()
    run = _compiled(model, 3) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run(_data()).sum().backward()
    optimizer.step()
    run(_data()).sum().backward(inputs=[model[0].weight])
    with pytest.raises(zpasses.ShardingError, match=r"another gathered copy.*get_parameter"):
        optimizer.step()
    optimizer.zero_grad()
    run(_data()).sum().backward(inputs=[model.get_parameter("0.weight")])
    optimizer.step()
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["0.weight"]


@on_ranks(2)
def test_a_group_that_is_empty_because_it_was_chosen_by_identity_is_told():
    model = _sharded()
    ids = {id(model[0].weight)}
    for choose in (lambda name, param: id(param) in ids, lambda name, param: name == "0.weight"):
        chosen = [param for name, param in model.named_parameters() if choose(name, param)]
        others = [param for name, param in model.named_parameters() if not choose(name, param)]
        optimizer = torch.optim.SGD([{"params": others}, {"params": chosen, "lr": 0.0}], lr=0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                optimizer.step()
        told = [str(each.message) for each in caught if "group 1 is empty" in str(each.message)]
        assert len(told) == (0 if chosen else 1)


@on_ranks(2)
def test_models_with_hooks_on_parameters_are_refused():
    said = r"parameter 0\.weight has hooks.*model\.get_parameter\('0\.weight'\)"
    for kind in ("register_hook", "register_post_accumulate_grad_hook"):
        model = _net()
        handle = getattr(model[0].weight, kind)(print)
        with pytest.raises(zpasses.ShardingError, match=said):
            _sharded(model)
        assert type(model[0].weight) is nn.Parameter
        handle.remove()
        _sharded(model)


# --- buffers, marks, copies -----------------------------------------------------------------------
@on_ranks(2)
def test_copies_are_no_buffers():
    model = _sharded()
    for value in (model[0].weight, model[0].weight.detach(), model[0].weight[0]):
        with pytest.raises(zpasses.ShardingError, match=r"buffer 'kept' of a Tanh.*clone\(\)"):
            model[1].register_buffer("kept", value)
    model[1].register_buffer("kept", model[0].weight.detach().clone())
    assert type(model[1].kept) is torch.Tensor


@on_ranks(2)
def test_marks_are_those_of_the_parameter():
    model = _net()
    model[0].weight.decay = False
    _sharded(model)
    assert model[0].weight.decay is False
    model[0].weight.kind = "matrix"
    assert dict(model.named_parameters())["0.weight"].kind == model[0].weight.kind == "matrix"
    assert not hasattr(model[0].weight, "unknown")


@on_ranks(2)
def test_copies_of_a_read_are_full_parameters():
    model = _sharded()
    for made in (copy.deepcopy(model[0].weight), pickle.loads(pickle.dumps(model[0].weight))):
        assert type(made) is nn.Parameter
        assert made.requires_grad
        assert torch.equal(made, model[0].weight)
    assert type(copy.deepcopy(model[0].weight.detach())) is torch.Tensor


@on_ranks(2)
def test_deleted_parameters_may_become_plain_tensors_and_parameters_again():
    model = _sharded()
    del model[0].weight
    assert not hasattr(model[0], "weight")
    model[0].weight = torch.zeros(5, 6)
    assert torch.equal(model(_data())[0], model(_data())[1])
    with pytest.raises(zpasses.ShardingError, match="has been deleted"):
        model[0].weight = model[2]._parameters["weight"].detach()
    del model[0].weight
    model[0].weight = nn.Parameter(torch.ones(5, 6))
    assert isinstance(model[0]._parameters["weight"], DTensor)
    assert model[0].weight.sum() == 30
