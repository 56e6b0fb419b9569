"""Runs a CUDA build of torch on CPUs without CUDA's libraries.

Package indices have a CUDA build of most versions of torch, and often nothing else. CUDA's
libraries take several GB, and torch loads all of them when it is imported. One small library with
their names replaces them. Each of its functions returns "no device", so torch finds no GPU.

`python -m tests.cuda_stubs` does it in the environment that runs it.
"""

from __future__ import annotations

import re
import subprocess
import sysconfig
import tempfile
from collections import defaultdict
from pathlib import Path

__all__ = ["replace_cuda_libraries"]

_LIBRARY = re.compile(r"lib(cu|nv|nccl)\w*\.so")
_SYMBOL = re.compile(r"(__)?(cu|nv|nccl)\w+")
_TEXT = re.compile(r"\w+(String|Name)")
_REQUIREMENT = re.compile(r"Requires-Dist: (nvidia|cuda|triton)\b.*\n")
_HEADER = """\
#define NUMBER(name) long name(void) { return 100; }  /* cudaErrorNoDevice */
#define TEXT(name) const char *name(void) { return "no CUDA"; }
"""


def replace_cuda_libraries(packages: Path) -> list[str]:
    """Gives an installed CUDA build of torch a stand-in for CUDA's libraries, and removes them from
    its requirements. Does nothing to other builds, and nothing the second time.

    Args:
        packages: the `site-packages` that torch is installed in.

    Returns:
        Names of the libraries that were replaced.
    """
    folder = packages / "torch" / "lib"
    libraries = sorted(each for each in folder.glob("*.so*") if not each.is_symlink())
    needed = {name for library in libraries for name in _needed(library)}
    missing = [
        name for name in sorted(needed) if _LIBRARY.match(name) and not (folder / name).exists()
    ]
    if missing:
        stub = folder / "libno_cuda.so"
        _compile_stub(_missing_symbols(libraries), stub)
        for name in missing:
            (folder / name).symlink_to(stub.name)
        for metadata in packages.glob("torch-*.dist-info/METADATA"):
            metadata.write_text(_REQUIREMENT.sub("", metadata.read_text()))
    return missing


def _needed(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+)\]", _output_of("readelf", "-d", str(library)))


def _missing_symbols(libraries: list[Path]) -> dict[str, str]:
    """Returns symbol -> its version, "" if it has none, of CUDA's symbols that no library has."""
    wanted: dict[str, str] = {}
    defined = set()
    for library in libraries:
        for line in _output_of("nm", "-D", str(library)).splitlines():
            *_, kind, text = line.split()
            name, _, version = text.partition("@")
            if kind != "U":
                defined.add(name)
            elif _SYMBOL.fullmatch(name):
                wanted[name] = version.lstrip("@")
    return {name: wanted[name] for name in sorted(wanted.keys() - defined)}


def _compile_stub(symbols: dict[str, str], stub: Path) -> None:
    by_version = defaultdict(list)
    for name, version in symbols.items():
        if version:
            by_version[version].append(f"{name};")
    lines = [f"{'TEXT' if _TEXT.fullmatch(name) else 'NUMBER'}({name})" for name in symbols]
    nodes = [f"{version} {{ {' '.join(names)} }};" for version, names in by_version.items()]
    with tempfile.TemporaryDirectory() as temporary:
        source, versions = Path(temporary) / "stub.c", Path(temporary) / "versions"
        source.write_text("\n".join([_HEADER, *lines, ""]))
        versions.write_text("\n".join(nodes))
        script = [f"-Wl,--version-script={versions}"] if nodes else []
        _output_of("cc", "-shared", "-fPIC", "-w", *script, "-o", str(stub), str(source))


def _output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    print(*replace_cuda_libraries(Path(sysconfig.get_path("purelib"))))
