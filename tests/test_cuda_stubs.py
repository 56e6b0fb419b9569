"""What noxfile.py runs: the quick tests, and the stand-in for CUDA's libraries."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_stubs import replace_cuda_libraries

ROOT = Path(__file__).parents[1]


def test_the_quick_tests_are_those_of_make():
    assigned = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.parse((ROOT / "noxfile.py").read_text()).body
        if isinstance(node, ast.Assign)
    }
    shown = subprocess.run(["make", "-n", "test"], cwd=ROOT, capture_output=True, text=True)
    quick = ast.literal_eval(assigned["QUICK"])
    arguments = " ".join(f'"{each}"' if " " in each else each for each in quick)
    assert f"-m pytest {arguments}" in shown.stdout


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
