"""The matrix of versions: its environments, the stand-in for CUDA's libraries, and its table."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zpasses.tools.matrix import __main__ as command
from zpasses.tools.matrix import environments
from zpasses.tools.matrix.cuda_stubs import replace_cuda_libraries
from zpasses.tools.matrix.environments import EnvironmentFailedError, Pair, find_python

ROOT = Path(__file__).parents[2]

TESTS = """
import pytest

def test_that_passes():
    pass

@pytest.mark.parametrize("number", [1, 2])
def test_that_fails_once(number):
    assert number == 1

@pytest.mark.skip(reason="of no use")
def test_that_is_skipped():
    pass

@pytest.mark.slow(quick="test_that_passes")
def test_that_is_slow():
    assert False
"""


def matrix(capsys, *arguments):
    code = command.main([str(each) for each in arguments])
    return code, capsys.readouterr().out


@pytest.fixture
def this_environment(monkeypatch):
    """Every pair runs in the environment of this process."""

    def made(pair, folder):
        folder.mkdir(exist_ok=True)
        return sys.executable

    monkeypatch.setattr(command, "make_environment", made)


def test_every_pair_runs_to_its_end_and_failures_are_named(tmp_path, capsys, this_environment):
    tests = tmp_path / "test_some.py"
    tests.write_text(TESTS)
    conftest = "import hypothesis\n\nhypothesis.settings.register_profile('quick')\n"
    (tmp_path / "conftest.py").write_text(conftest)
    alone = ("--", tests, "-n", 0, "-p", "no:cacheprovider")
    code, shown = matrix(
        capsys, "--torch", "2.13", "2.15", "--python", "3.13", "--folder", tmp_path, *alone
    )
    assert code == 1
    assert re.findall(r"\| 2\.1\d +\| 3\.13 +\| 2 +\| 1 +\| 1 +\| 0 +\|", shown) == [
        "| 2.13    | 3.13     | 2        | 1        | 1         | 0         |",
        "| 2.15    | 3.13     | 2        | 1        | 1         | 0         |",
    ]
    assert shown.count("test_some.py::test_that_fails_once[2]") == 2
    tests.write_text("def test_that_passes():\n    pass\n")
    code, shown = matrix(capsys, "--torch", "2.15", "--folder", tmp_path, *alone)
    assert code == 0, shown


@pytest.mark.slow(quick="test_every_pair_runs_to_its_end_and_failures_are_named")
def test_a_run_without_a_result_is_a_failure(tmp_path, capsys, this_environment):
    code, shown = matrix(
        capsys, "--torch", "2.15", "--folder", tmp_path, "--", tmp_path / "none.py", "-n", 0
    )
    assert code == 1
    assert "pytest ended with status 4; see" in shown


def test_a_missing_python_is_named_and_the_others_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, shown = matrix(
        capsys, "--torch", "2.15", "--python", "3.98", "3.99", "--folder", tmp_path
    )
    assert code == 1
    for version in ("3.98", "3.99"):
        assert f"found no python{version} that can make virtual environments" in shown


def test_python_is_found_in_pyenv_where_its_command_fails(tmp_path, monkeypatch):
    """As pyenv does for versions that are not chosen."""
    home = tmp_path / "versions" / "3.98.1" / "bin"
    home.mkdir(parents=True)
    for path, text in {
        tmp_path / "python3.98": "exit 127",
        home / "python3.98": "exit 0",
        tmp_path / "pyenv": f"echo {home.parent}",
    }.items():
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_python("3.98") == str(home / "python3.98")
    (home / "python3.98").unlink()
    with pytest.raises(EnvironmentFailedError, match=r"found no python3\.98"):
        find_python("3.98")


def test_a_minor_version_takes_its_newest_release():
    assert Pair("2.15", "3.13").requirement == "torch>=2.15,<2.16.dev0"
    assert Pair("2.15.0", "3.13").requirement == "torch==2.15.0"


def test_a_complete_environment_is_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(environments, "_run", lambda *command: pytest.fail("installs"))
    (tmp_path / "complete").touch()
    python = environments.make_environment(Pair("2.15", "3.13"), tmp_path)
    assert python == str(tmp_path / "bin" / "python")


def test_the_quick_tests_are_those_of_make():
    shown = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True)
    arguments = " ".join(f'"{each}"' if " " in each else each for each in command.QUICK)
    assert f"-m pytest {arguments}" in shown.stdout


# --- CUDA's libraries -----------------------------------------------------------------------------
LIBRARY = """
long cuOne(void); long cuTwo(void); const char *cuErrorString(void);
long torch_one(void) { return cuOne() + cuTwo(); }
const char *torch_text(void) { return cuErrorString(); }
"""


@pytest.mark.skipif(not shutil.which("cc") or sys.platform != "linux", reason="needs cc and ELF")
def test_a_library_loads_without_those_of_cuda(tmp_path):
    lib = tmp_path / "torch" / "lib"
    lib.mkdir(parents=True)
    info = tmp_path / "torch-2.15.0.dist-info"
    info.mkdir()
    lines = ["Name: torch", "Requires-Dist: sympy", "Requires-Dist: nvidia-nccl-cu13==2.0"]
    (info / "METADATA").write_text("".join(f"{line}\n" for line in lines))

    def cc(out, text, *arguments):
        source = tmp_path / "source.c"
        source.write_text(text)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", out, source, *arguments], check=True)

    versions = tmp_path / "versions"
    versions.write_text("libcuda.so.1 { cuOne; };")
    cc(
        tmp_path / "libcuda.so.1",
        "long cuOne(void) { return 1; }",
        f"-Wl,-soname,libcuda.so.1,--version-script={versions}",
    )
    cc(
        tmp_path / "libnccl.so.2",
        "void cuTwo(void) {} void cuErrorString(void) {}",
        "-Wl,-soname,libnccl.so.2",
    )
    found = [tmp_path / "libcuda.so.1", tmp_path / "libnccl.so.2"]
    cc(lib / "libtorch_cuda.so", LIBRARY, *found, "-Wl,-rpath,$ORIGIN", "-Wl,-z,now")
    for each in found:
        each.unlink()
    assert replace_cuda_libraries(tmp_path) == ["libcuda.so.1", "libnccl.so.2"]
    program = f"""
import ctypes
library = ctypes.CDLL({str(lib / "libtorch_cuda.so")!r})
library.torch_text.restype = ctypes.c_char_p
print(library.torch_one(), library.torch_text())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "200 b'no CUDA'\n", ran.stderr
    assert (info / "METADATA").read_text() == "Name: torch\nRequires-Dist: sympy\n"
    assert replace_cuda_libraries(tmp_path) == []
