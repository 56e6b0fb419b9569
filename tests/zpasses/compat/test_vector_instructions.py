"""Inductor's choice of vector instructions, as a later process remembers it."""

import platform

import pytest
from torch._inductor import config, cpu_vec_isa

from zpasses import compat
from zpasses.compat import vector_instructions

pytestmark = pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64"), reason="Inductor tries x86 instructions only"
)


def forget():
    vector_instructions._forget(cpu_vec_isa)


@pytest.fixture
def tried(monkeypatch):
    """The instructions that this process tries, which all work."""
    found = []
    monkeypatch.setattr(
        cpu_vec_isa.VecISA, "check_build", lambda self, code: found.append(str(self)) or True
    )
    forget()
    with config.patch({"cpp.vec_isa_ok": None}):
        yield found
    forget()


def chosen():
    """The choice of this process."""
    return vector_instructions._working(cpu_vec_isa)


def known_after_trying(tried):
    """What this process finds out."""
    known = compat.try_vector_instructions()
    tried.clear()
    return known


def test_another_process_need_not_try(tried):
    known = known_after_trying(tried)
    assert compat.remember_vector_instructions(known)
    assert [str(each) for each in cpu_vec_isa.valid_vec_isa_list()] == [
        name for name, _ in known[1]
    ]
    assert chosen() == known[1]
    assert tried == []


def test_trials_leave_the_choice_open(tried):
    known = known_after_trying(tried)
    assert compat.must_try_vector_instructions()
    assert compat.try_vector_instructions() == known
    assert set(tried) >= {name for name, _ in known[1]}
    assert compat.must_try_vector_instructions()
    tried.clear()
    assert compat.remember_vector_instructions(known)
    assert not compat.must_try_vector_instructions()
    assert chosen() == known[1]
    assert tried == []


def test_inductor_does_not_see_trials(tried):
    """Its objects of sets of instructions are equal to copies of them, and it caches answers."""
    known = known_after_trying(tried)
    compat.try_vector_instructions()
    tried.clear()
    assert cpu_vec_isa.valid_vec_isa_list()
    assert set(tried) >= {name for name, _ in known[1]}
    assert chosen() == known[1]


@pytest.mark.parametrize("fails", ["a set", "an addition to a set", "with an error"])
def test_what_does_not_work_is_not_known_to_work(tried, monkeypatch, fails):
    """A compiler that was killed looks the same, so nothing is known then."""
    best = known_after_trying(tried)[1][0][0]

    def works(self, code):
        if fails == "with an error":
            raise RuntimeError("no compiler")
        return str(self) != best if fails == "a set" else "avx512bf16" not in self._arch_flags

    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", works)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)
    sets = vector_instructions._candidates(cpu_vec_isa)
    if fails == "an addition to a set" and not isinstance(sets[0], cpu_vec_isa.VecAVX512):
        pytest.skip("needs a processor with AVX512")
    assert compat.try_vector_instructions() is None
    assert compat.must_try_vector_instructions()


@pytest.mark.parametrize("differs", ["toolchain", "processor", "not all work", "flags", "nothing"])
def test_a_process_that_may_differ_tries_itself(tried, differs):
    toolchain, working = known_after_trying(tried)
    known = {
        "toolchain": ("another compiler", working),
        "processor": (toolchain, (("another", "-manother"), *working)),
        "not all work": (toolchain, working[1:]),
        "flags": (toolchain, tuple((name, f"{flags} -mmore") for name, flags in working)),
        "nothing": None,
    }[differs]
    assert not compat.remember_vector_instructions(known)
    assert compat.must_try_vector_instructions()
    assert tried == []
    assert list(map(str, cpu_vec_isa.valid_vec_isa_list())) == [name for name, _ in working]
    assert set(tried) >= {name for name, _ in working}


def test_the_users_setting_is_kept(tried):
    known = known_after_trying(tried)
    with config.patch({"cpp.vec_isa_ok": False}):
        assert not compat.must_try_vector_instructions()
        assert not compat.remember_vector_instructions(known)
        assert cpu_vec_isa.valid_vec_isa_list() == []


@pytest.mark.parametrize(
    "name", ["valid_vec_isa_list", "x86_isa_checker", "supported_vec_isa_list"]
)
def test_another_torch_tries_for_itself(tried, monkeypatch, name):
    known = known_after_trying(tried)
    with monkeypatch.context() as patched:
        patched.delattr(cpu_vec_isa, name)
        assert not compat.must_try_vector_instructions()
        assert not compat.remember_vector_instructions(known)
