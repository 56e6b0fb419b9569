"""`zpasses.save_safetensors` and `zpasses.load_safetensors`."""

import json
import weakref
from unittest import mock

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

import zpasses
from tests.on_ranks import on_ranks, rank_0_before_rank_1
from tests.zpasses.checkpoint.checkpoint_models import Several, changed, sharded
from tests.zpasses.models import Tied, assert_same_values
from zpasses.checkpoint import model_tensors, safetensors_reader, safetensors_writer
from zpasses.testing import run_on_ranks

pytestmark = pytest.mark.processes


@pytest.fixture
def folder(tmp_path):
    """Made in pytest's process, so it is the same one on all ranks."""
    return tmp_path


def full(model):
    return zpasses.full_state_dict(model)


# --- there and back -------------------------------------------------------------------------------
def _saves(folder, size):
    plain = Several()
    model = torch.compile(sharded(plain))
    names = zpasses.save_safetensors(model, folder, max_shard_size=size, metadata={"step": "3"})
    return names, dict(plain.state_dict())


def _loads(path):
    model = sharded(changed(Several()))
    assert zpasses.load_safetensors(model, path) == ([], [])
    return full(model)


def test_files_are_those_of_save_pretrained_and_load_on_any_number_of_ranks(tmp_path):
    names, expected = run_on_ranks(_saves, str(tmp_path), 300)[0]
    for ranks in (1, 2, 3):
        for state in run_on_ranks(_loads, str(tmp_path), ranks=ranks):
            assert_same_values(state, expected)
    files = {path.name for path in tmp_path.iterdir()}
    assert files == {*names, "model.safetensors.index.json"}
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    read = {}
    for name in names:
        part = safetensors.torch.load_file(tmp_path / name)
        assert {index["weight_map"][each] for each in part} == {name}
        assert sum(each.nbytes for each in part.values()) <= 300 or len(part) == 1
        with safe_open(tmp_path / name, "pt") as opened:
            metadata = opened.metadata()
        assert (metadata["format"], metadata["step"]) == ("pt", "3")
        assert metadata["tied.head.weight"] == "tied.embed.weight"
        read |= part
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in read.values())
    assert set(read) == set(expected) - {"tied.head.weight"}
    assert_same_values(dict(sorted(read.items())), {name: expected[name] for name in sorted(read)})


def test_plain_model_loads_the_file(tmp_path):
    _, expected = run_on_ranks(_saves, str(tmp_path / "net.safetensors"), "1GiB")[0]
    plain = changed(Several())
    safetensors.torch.load_model(plain, tmp_path / "net.safetensors")
    assert_same_values(dict(plain.state_dict()), expected)
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


@on_ranks(2)
def test_later_save_replaces_all_files_of_the_earlier_one(folder):
    model = sharded(Several())
    zpasses.save_safetensors(model, folder, max_shard_size=200)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    for size in (300, 1, "5GB"):
        names = zpasses.save_safetensors(model, folder, max_shard_size=size)
        dist.barrier()
        left = {path.name for path in folder.iterdir()} - {"model.safetensors.index.json"}
        assert left == set(names)
        assert (len(names) == 1) == (size == "5GB")
        loaded = sharded(Several())
        zpasses.load_safetensors(loaded, folder)
        assert_same_values(full(loaded), full(model))


@on_ranks(2)
def test_rank_holds_one_full_tensor_at_a_time(folder):
    model = sharded(nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]))
    gathered = []

    def gather(tensor, destination, **kwargs):
        assert all(ref() is None for ref in gathered), "the tensor before this one is still alive"
        result = model_tensors.gather_full(tensor, destination, **kwargs)
        assert (result is None) == (dist.get_rank() != 0)
        if result is not None:
            gathered.append(weakref.ref(result))
        return result

    with mock.patch.object(safetensors_writer, "gather_full", gather):
        zpasses.save_safetensors(model, folder)
    assert len(gathered) == (0 if dist.get_rank() else 16)


@on_ranks(2)
def test_rank_reads_its_own_rows_only(folder):
    model = sharded(nn.Linear(6, 5))
    zpasses.save_safetensors(model, folder)
    shapes = []

    def watched(opened, name, tensor, _read=safetensors_reader._own_part):
        part = _read(opened, name, tensor)
        shapes.append(tuple(part.shape))
        return part

    with mock.patch.object(safetensors_reader, "_own_part", watched):
        zpasses.load_safetensors(model, folder)
    rows = 2 if dist.get_rank() else 3
    assert sorted(shapes) == [(rows,), (rows, 6)]


@on_ranks(2)
def test_values_are_converted_to_the_dtype_of_the_model(folder):
    plain = nn.Linear(6, 5)
    zpasses.save_safetensors(sharded(plain), folder)
    model = sharded(changed(plain).bfloat16())
    zpasses.load_safetensors(model, folder)
    assert_same_values(full(model), dict(plain.bfloat16().state_dict()))


@on_ranks(2)
def test_model_built_on_meta_is_loaded_after_to_empty(folder):
    plain = nn.Linear(6, 5)
    zpasses.save_safetensors(sharded(plain), folder)
    with torch.device("meta"):
        model = sharded(nn.Linear(6, 5))
    with pytest.raises(zpasses.ShardingError, match=r"on meta.*Call to_empty"):
        zpasses.load_safetensors(model, folder)
    with pytest.raises(zpasses.ShardingError, match=r"on meta.*Call to_empty"):
        zpasses.save_safetensors(model, folder)
    model.to_empty(device="cpu")
    zpasses.load_safetensors(model, folder)
    assert_same_values(full(model), dict(plain.state_dict()))


@on_ranks(2)
def test_cached_parameters_are_gathered_again_after_a_load(folder):
    plain, x = nn.Linear(3, 1, bias=False), torch.ones(2, 3)  # rank 1 has no rows
    zpasses.save_safetensors(sharded(plain), folder)
    model = sharded(changed(plain))
    run = torch.compile(model, backend="zpasses", options={"zero_stage": 2, "codegen": "eager"})
    run(x)
    zpasses.load_safetensors(model, folder)
    torch.testing.assert_close(run(x), plain(x))


# --- Hugging Face ---------------------------------------------------------------------------------
def _config(**changes):
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_attention_heads": 2}
    options = {"vocab_size": 30, "num_hidden_layers": 2, "num_key_value_heads": 2}
    return LlamaConfig(**{**sizes, **options, "tie_word_embeddings": True, **changes})


def _llama(seed=0, **changes):
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(_config(**changes))


@on_ranks(2)
@pytest.mark.slow(quick="test_save_pretrained_on_one_rank_is_an_error_on_all")
def test_save_pretrained_and_from_pretrained(folder):
    plain = _llama()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder / "theirs", max_shard_size="4KB")
    dist.barrier()
    model = sharded(_llama(seed=1))
    zpasses.load_safetensors(model, folder / "theirs")
    assert_same_values(full(model), dict(plain.state_dict()))
    zpasses.save_safetensors(model, folder / "ours", max_shard_size="4KB")
    model.config.save_pretrained(folder / "ours")
    dist.barrier()
    back = type(plain).from_pretrained(folder / "ours")
    assert_same_values(dict(back.state_dict()), dict(plain.state_dict()))
    assert back.lm_head.weight is back.model.embed_tokens.weight
    assert {path.name for path in (folder / "ours").glob("model*")} == {
        path.name for path in (folder / "theirs").glob("model*")
    }


@on_ranks(2)
def test_untied_checkpoint_for_a_tied_model_is_refused(folder):
    zpasses.save_safetensors(sharded(_llama(tie_word_embeddings=False)), folder)
    with pytest.raises(zpasses.ShardingError, match=r"are one tied weight here.*values differ"):
        zpasses.load_safetensors(sharded(_llama()), folder)


# --- what does not match --------------------------------------------------------------------------
@on_ranks(2)
def test_names_that_differ_are_listed_and_nothing_is_changed(folder):
    zpasses.save_safetensors(sharded(nn.ModuleDict({"a": nn.Linear(2, 2)})), folder)
    model = sharded(nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2)}))
    before = full(model)
    with pytest.raises(
        zpasses.ShardingError,
        match=r"Missing in the checkpoint: b.weight, b.bias\. Unknown to the model: a.bias\..*"
        "strict=False",
    ):
        zpasses.load_safetensors(model, folder)
    assert_same_values(full(model), before)
    result = zpasses.load_safetensors(model, folder, strict=False)
    assert result == (["b.weight", "b.bias"], ["a.bias"])
    assert torch.equal(full(model)["b.weight"], before["b.weight"])
    assert not torch.equal(full(model)["a.weight"], before["a.weight"])


COUNTS = nn.ParameterDict({"weight": nn.Parameter(torch.ones(2, 2).long(), requires_grad=False)})
NESTED = nn.ModuleDict({"net": nn.Linear(2, 2)})
WRONG = {
    "shape": (nn.Linear(3, 2), r"weight is \[2, 2\] in the checkpoint and \[2, 3\] here"),
    "kind": (COUNTS, r"weight is F32 in the checkpoint and torch.int64 here"),
    "prefix of the model": (NESTED, r"begin with 'net\.': load into that submodule"),
}


@on_ranks(2)
def test_mismatches_are_refused(folder):
    zpasses.save_safetensors(sharded(nn.Linear(2, 2)), folder)
    for case, (model, message) in WRONG.items():
        for strict in (True, False):
            if case.startswith("prefix") and not strict:
                found = zpasses.load_safetensors(sharded(model), folder, strict=False)
                assert found == (["net.weight", "net.bias"], ["bias", "weight"])
                continue
            with pytest.raises(zpasses.ShardingError, match=message):
                zpasses.load_safetensors(sharded(model), folder, strict=strict)
    zpasses.save_safetensors(sharded(nn.ModuleDict({"net": nn.Linear(2, 2)})), folder)
    with pytest.raises(zpasses.ShardingError, match=r"checkpoint begin with 'net\.'"):
        zpasses.load_safetensors(sharded(nn.Linear(2, 2)), folder)


EMPTY = safetensors.torch.save({})


def _index(of="part", text='{"weight_map": {"weight": "%s.safetensors"}}'):
    return {"model.safetensors.index.json": text.replace("%s", of).encode()}


UNREADABLE = {
    "not a complete safetensors file": {"model.safetensors": b"x" * 100},
    "expected a JSON object with 'weight_map'": _index(text='{"weights": 3}'),
    "names files that are not there: other.safetensors": _index("other"),
    "a.safetensors, b.safetensors, and none is called model.safetensors": dict.fromkeys(
        ("a.safetensors", "b.safetensors"), EMPTY
    ),
    "no safetensors files. It holds pytorch_model.bin": {"pytorch_model.bin": b""},
    "lacks weight, which the index names": {"part.safetensors": EMPTY, **_index()},
}
"""What is said, and the files of a checkpoint."""


@on_ranks(2)
def test_unreadable_checkpoints_are_refused(folder):
    for number, (message, files) in enumerate(UNREADABLE.items()):
        own = folder / str(number)
        own.mkdir(exist_ok=True)
        if dist.get_rank() == 0:
            for name, content in files.items():
                (own / name).write_bytes(content)
        dist.barrier()
        with pytest.raises(zpasses.ShardingError, match=message):
            zpasses.load_safetensors(sharded(nn.Linear(2, 2)), own)


# --- ranks ----------------------------------------------------------------------------------------
@on_ranks(2)
def test_path_that_one_rank_does_not_see_is_an_error_on_all(folder):
    model = sharded(nn.Linear(2, 2))
    zpasses.save_safetensors(model, folder)
    path = folder if dist.get_rank() == 0 else folder / "elsewhere"
    with pytest.raises(zpasses.ShardingError, match=r"failed on rank 1: there is no .*elsewhere"):
        zpasses.load_safetensors(model, path)


@on_ranks(2)
def test_ranks_with_different_checkpoints_are_told(folder):
    for size in (4, 5):
        zpasses.save_safetensors(sharded(nn.Linear(2, size)), folder / f"{size}")
    model = sharded(nn.Linear(2, 4 + dist.get_rank()))
    with pytest.raises(zpasses.AgreementError, match="ranks differ in the checkpoint"):
        zpasses.load_safetensors(model, folder / f"{4 + dist.get_rank()}")


@on_ranks(2)
def test_disk_that_fails_is_an_error_on_all_ranks_and_leaves_the_old_checkpoint(folder):
    model = sharded(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    zpasses.save_safetensors(model, folder)
    before = full(model)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    calls = []

    def full_disk(tensor):
        calls.append(tensor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return memoryview(b"\0" * tensor.nbytes)

    with (
        mock.patch.object(safetensors_writer, "_bytes_of", full_disk),
        pytest.raises(zpasses.ShardingError, match=r"on rank 0: .*No space left.*Free space"),
    ):
        zpasses.save_safetensors(model, folder)
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    zpasses.load_safetensors(model, folder)
    assert_same_values(full(model), before)


@on_ranks(2)
def test_an_error_that_is_not_of_the_disk_is_told_as_it_is(folder):
    broken = mock.patch.object(safetensors_writer, "_header", side_effect=TypeError("no JSON"))
    with broken, pytest.raises(zpasses.ShardingError, match=r"on rank 0: TypeError: no JSON$"):
        zpasses.save_safetensors(sharded(nn.Linear(2, 2)), folder)
    dist.barrier()
    assert not list(folder.iterdir())


@on_ranks(2, timeout_s=60)
def test_a_rank_without_memory_for_a_full_tensor_takes_part_in_all_gathers(folder):
    model = sharded(nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))))
    sizes = []

    def empty(size, *, _empty=torch.empty, **kwargs):
        sizes.append(size)
        if len(sizes) in (2, 4):
            raise torch.OutOfMemoryError("out of memory")
        return _empty(size, **kwargs)

    with (
        mock.patch.object(torch, "empty", empty),
        pytest.raises(zpasses.ShardingError, match=r"on rank 0: OutOfMemoryError: out of memory$"),
    ):
        zpasses.save_safetensors(model, folder)
    assert len(sizes) == (0 if dist.get_rank() else 6)
    assert not list(folder.iterdir())
    # The ranks are still at the same collective.
    zpasses.save_safetensors(model, folder)
    loaded = sharded(changed(nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))))
    zpasses.load_safetensors(loaded, folder)
    assert_same_values(full(loaded), full(model))


@pytest.mark.parametrize("metadata", [{"epoch": 3}, {3: "epoch"}, {"net": nn.Linear}])
@on_ranks(2)
def test_metadata_that_is_no_text_is_refused(folder, metadata):
    with pytest.raises(zpasses.ShardingError, match=r"on rank 0: metadata is .* hold text only"):
        zpasses.save_safetensors(sharded(nn.Linear(2, 2)), folder, metadata=metadata)
    assert not list(folder.iterdir())


@on_ranks(2)
def test_a_save_on_one_rank_does_not_hang(folder):
    model = sharded(nn.Linear(4, 4))
    error = pytest.raises(zpasses.AgreementError, match=r"rank 1 .* did not .*save_safetensors")
    with rank_0_before_rank_1(), error:
        zpasses.save_safetensors(model, folder, timeout_s=0.4)
    assert not list(folder.iterdir())


def test_sizes_that_are_none_and_extra_state_are_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"step": 3}

    for size in (0, "5 apples", "GB", True, -1, "0GB"):
        with pytest.raises(zpasses.OptionError, match="bytes above 0, or text such as '5GB'"):
            zpasses.save_safetensors(nn.Linear(2, 2), tmp_path, max_shard_size=size)
    with pytest.raises(zpasses.ShardingError, match=r"'_extra_state' .* is a dict.*checkpoint"):
        zpasses.save_safetensors(Extra(2, 2), tmp_path)


def test_model_without_ranks(tmp_path):
    plain, other = Tied(), Tied()
    zpasses.save_safetensors(plain, tmp_path)
    zpasses.load_safetensors(other, tmp_path)
    assert_same_values(dict(other.state_dict()), dict(plain.state_dict()))
