"""What a new version of torch breaks, in one list: the private names that `zpasses/compat` uses."""

import pytest

from tests.zpasses.compat import private_names
from tests.zpasses.compat.private_names import VERSION, exists, read_table, used_names

UPDATE = "run `python -m tests.zpasses.compat.private_names` with each supported torch"


def test_the_table_has_the_names_that_compat_uses():
    used, known = used_names(), read_table()
    lines = [f"{place}: {name} is new" for name, place in used.items() if name not in known]
    lines += [f"{name} is unused" for name in known if name not in used]
    assert not lines, "\n".join([f"{private_names.TABLE.name} is stale; {UPDATE}:", *lines])


def test_this_torch_has_the_private_names_that_the_table_says():
    """Of a version that the table does not know, it must have what the newest one has."""
    used, known = used_names(), read_table()
    newest = max((each for versions in known.values() for each in versions), key=_numbers)
    like = VERSION if any(VERSION in versions for versions in known.values()) else newest
    lines = [
        f"{used[name]}: {name} ({'only in' if like in versions else 'not in'} {' '.join(versions)})"
        for name, versions in known.items()
        if name in used and exists(name) != (like in versions)
    ]
    assert not lines, "\n".join(
        [f"torch {VERSION} differs from the table in {len(lines)} private names:", *lines]
    )


def _numbers(version):
    return [int(part) for part in version.split(".")]


def test_a_torch_without_a_name_gets_its_place_and_the_versions_that_have_it(monkeypatch):
    from torch.fx import _graph_pickler

    monkeypatch.delattr(_graph_pickler, "patch_pytree_map_over_slice")
    name = "torch.fx._graph_pickler.patch_pytree_map_over_slice"
    listed = rf"differs .* in 1 private names:\n +artifacts.py:\d+: {name} \(only in 2\.12 2\.13"
    with pytest.raises(AssertionError, match=listed):
        test_this_torch_has_the_private_names_that_the_table_says()


def test_names_are_found_however_the_code_reaches_them():
    assert {
        "torch._C._current_graph_task_id",  # cast(Any, torch._C)._current_graph_task_id()
        "torch._functorch.config.cse",  # functorch_config.patch(cse=False)
        "torch._inductor.config.unsafe_marked_cacheable_functions",  # config.patch({"...": known})
        "torch._inductor.config.triton.cudagraphs",  # a key of a table of options
        "torch._inductor.fx_passes.overlap_scheduling.estimate_roofline_runtime_ms",  # patch.object
        "torch.distributed.tensor.DTensor._local_tensor",  # each._local_tensor
        "torch.fx._lazy_graph_module._LazyGraphModule.force_recompile",
    } <= used_names().keys()
