"""Parameters of other libraries that hold codes: bitsandbytes and torchao."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import zpasses
from tests.on_ranks import needs, on_ranks
from zpasses import ShardingError
from zpasses.testing import fake_world, world_mesh


def linear_4bit(width=128, rows=48, *, to="cpu", module="Linear4bit", **options):
    """A quantized layer, and its weight as bitsandbytes decodes it."""
    import bitsandbytes as bnb

    torch.manual_seed(0)
    layer = getattr(bnb.nn, module)(width, rows, **options)
    if to is None:
        return nn.Sequential(layer)
    layer = layer.to(to)
    decoded = bnb.functional.dequantize_4bit(layer.weight, layer.weight.quant_state)
    return nn.Sequential(layer).requires_grad_(False), decoded


def quantized(config, width=128, rows=48):
    from torchao import quantization

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, rows)).requires_grad_(False)
    quantization.quantize_(net, getattr(quantization, config)())
    return net


def nf4(dtype=torch.float32, width=256, rows=64):
    from torchao.quantization import to_nf4

    net = nn.Sequential(nn.Linear(width, rows, bias=False)).to(dtype).requires_grad_(False)
    net[0].weight = nn.Parameter(to_nf4(net[0].weight.detach()), requires_grad=False)
    return net


@needs("bitsandbytes")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_weights_of_bitsandbytes_decode_to_the_same_bits(kind, dtype):
    for nested in (False, True):
        net, value = linear_4bit(quant_type=kind, compress_statistics=nested, compute_dtype=dtype)
        x = torch.randn(3, 128)
        expected = net(x)
        with fake_world(1) as mesh:
            zpasses.shard(net, mesh=mesh)
            assert list(dict(net.named_parameters())) == [f"0.weight_{kind}_64", "0.bias"]
            assert net[0].weight.dtype == dtype
            assert torch.equal(net[0].weight, value.to(dtype))
            assert torch.equal(net(x), expected)
            assert net(x).dtype == expected.dtype


@needs("torchao")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nf4_tensors_of_torchao_decode_to_the_same_bits(dtype):
    net = nf4(dtype)
    value, x = net[0].weight.get_original_weight(), torch.randn(3, 256, dtype=dtype)
    expected = net(x)
    with fake_world(1) as mesh:
        zpasses.shard(net, mesh=mesh)
        assert torch.equal(net[0].weight, value)
        assert torch.equal(net(x), expected)


@needs("torchao")
def test_nf4_tensors_of_torchao_before_0_18_are_taken(monkeypatch):
    from torchao import quantization

    net = nf4()
    value, older = net[0].weight.get_original_weight(), ModuleType("torchao.dtypes")
    older.NF4Tensor = quantization.NF4Tensor
    monkeypatch.setitem(sys.modules, "torchao.dtypes", older)
    monkeypatch.delattr(quantization, "NF4Tensor")
    with fake_world(1) as mesh:
        zpasses.shard(net, mesh=mesh)
        assert torch.equal(net[0].weight, value)


@needs("bitsandbytes")
def test_each_rank_holds_the_records_of_its_rows():
    net, _ = linear_4bit(quant_type="nf4")
    packed = net[0].weight.view(48, 64)
    with fake_world(2, 1) as mesh:
        zpasses.shard(net, mesh=mesh, pack_mb=1.0)
        rows = net[0].get_parameter("weight_nf4_64").to_local()
        assert rows.shape == (24, 2 * 4 + 64 + 8)
        assert torch.equal(rows[:, 8:72], packed[24:])


# --- what is refused ------------------------------------------------------------------------------
@needs("torchao")
@pytest.mark.parametrize(
    ("config", "kind"),
    [("Int8WeightOnlyConfig", "Int8Tensor"), ("Float8WeightOnlyConfig", "Float8Tensor")],
)
def test_weights_of_torchao_that_cannot_be_cut_are_refused_and_may_be_left_out(config, kind):
    net, x = quantized(config), torch.randn(2, 128)
    expected = net(x)
    with fake_world(2) as mesh:
        match = rf"parameter 0\.weight is torchao's {kind} \[48, 128\].*encode_parameters"
        with pytest.raises(ShardingError, match=match):
            zpasses.shard(net, mesh=mesh)
        assert torch.equal(net(x), expected)  # nothing has changed
    with fake_world(1) as mesh:
        zpasses.shard(net, mesh=mesh, ignored_params=[net[0].weight])
        assert torch.equal(net(x), expected)


@pytest.mark.parametrize(
    ("dtype", "why"),
    [
        (torch.int64, r"own is tests's Own \[4, 3\]: it holds int64, .* If they are plain"),
        (torch.complex64, "parameter own is complex; keep its real view"),
    ],
)
def test_a_parameter_class_without_floating_point_values_is_refused_as_what_it_is(dtype, why):
    class Own(nn.Parameter):
        pass

    model = nn.Linear(4, 4)
    model.own = Own(torch.ones(4, 3, dtype=dtype), requires_grad=False)
    with fake_world(2) as mesh, pytest.raises(ShardingError, match=why):
        zpasses.shard(model, mesh=mesh)


@needs("torchao")
def test_nf4_tensors_that_cannot_be_cut_are_refused():
    with fake_world(2) as mesh:
        net = nf4()
        net[0].weight.requires_grad_(True)
        with pytest.raises(ShardingError, match=r"torchao's NF4Tensor .* is trained\. Freeze it"):
            zpasses.shard(net, mesh=mesh)
        with pytest.raises(ShardingError, match="rows of 32 values are not whole blocks of 64"):
            zpasses.shard(nf4(width=32, rows=512), mesh=mesh)


@needs("bitsandbytes")
def test_weights_of_bitsandbytes_that_cannot_be_cut_are_refused(monkeypatch):
    import bitsandbytes as bnb

    wide, _ = linear_4bit(width=96, rows=64)
    int8 = nn.Sequential(bnb.nn.Linear8bitLt(128, 48, has_fp16_weights=False)).to("cpu")
    unmoved = nn.Sequential(bnb.nn.Linear8bitLt(128, 48, has_fp16_weights=False))
    table = nn.Sequential(bnb.nn.Embedding4bit(64, 128)).to("cpu")
    hooked, _ = linear_4bit()
    hooked[0].forward = hooked[0].forward
    packed, _ = linear_4bit()
    packed[0].weight.quant_state.packing_format_for_cpu = True
    cases = [
        (wide, r"Params4bit.*rows of 96 values are not whole blocks of 64"),
        (linear_4bit(to=None), r"parameter 0\.weight is bitsandbytes's Params4bit.*no codes yet"),
        (int8, r"parameter 0\.weight is bitsandbytes's Int8Params \[48, 128\].*ignored_params"),
        (unmoved, r"parameter 0\.weight is bitsandbytes's Int8Params \[48, 128\].*reads scales"),
        (table, r"its module, Embedding4bit, has another forward than Linear4bit"),
        (hooked, r"forward of module 0 was replaced on the instance.*remove_hook_from_module"),
        (packed, r"packed for inference"),
    ]
    with fake_world(2) as mesh:
        for net, match in cases:
            with pytest.raises(ShardingError, match=match):
                zpasses.shard(net, mesh=mesh)
        columns, _ = linear_4bit()
        zpasses.shard(columns, mesh=mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1))
        assert columns[0].get_parameter("weight_fp4_64").placements[0] == Shard(0)


# --- training -------------------------------------------------------------------------------------
def _adapted(kind):
    """A tiny Llama whose layers are quantized, with adapters."""
    import bitsandbytes as bnb
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    net = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    for path, module in list(net.model.named_modules()):
        if isinstance(module, nn.Linear):
            made = bnb.nn.Linear4bit(
                module.in_features, module.out_features, bias=False, quant_type=kind
            )
            made.load_state_dict(module.state_dict())
            parent, _, name = path.rpartition(".")
            setattr(net.model.get_submodule(parent), name, made.to("cpu"))
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    return get_peft_model(net, config)


def _trained(net, step, steps=3):
    """Losses and adapters of some steps with the same batches on all ranks."""
    trains = [param for param in net.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trains, lr=1e-2)
    generator, results = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        tokens = torch.randint(64, (2, 16), generator=generator)
        loss = step(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach())
    adapters = [getattr(each, "full_tensor", lambda each=each: each)() for each in trains]
    return results + [each.detach() for each in adapters]


def _compare(kind, **options):
    plain, net = _adapted(kind), zpasses.shard(_adapted(kind), mesh=world_mesh())
    names = [name for name, param in net.named_parameters() if param.dtype == torch.uint8]
    assert len(names) == 14
    assert all(name.endswith(f".base_layer.weight_{kind}_64") for name in names)
    step = torch.compile(net, backend="zpasses", options=options) if options else net
    for mine, theirs in zip(_trained(net, step), _trained(plain, plain), strict=True):
        if options.get("codegen") == "inductor":  # sums of generated code have another order
            torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-4)
        else:
            assert torch.equal(mine, theirs)


@needs("bitsandbytes")
@needs("peft")
@pytest.mark.slow(quick="test_weights_of_bitsandbytes_decode_to_the_same_bits")
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@on_ranks(2, timeout_s=400)
def test_adapters_train_as_on_the_unsharded_model_bit_for_bit(kind):
    _compare(kind)
    _compare(kind, zero_stage=3, codegen="eager")


@needs("bitsandbytes")
@needs("peft")
@pytest.mark.inductor
@pytest.mark.slow(quick="test_weights_of_bitsandbytes_decode_to_the_same_bits")
@on_ranks(2, timeout_s=500)
def test_adapters_train_with_generated_code():
    _compare("nf4", zero_stage=3, codegen="inductor", cache=False)
