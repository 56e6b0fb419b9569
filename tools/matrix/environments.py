"""Virtual environments of the matrix: one per version of torch and of Python."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from zpasses.errors import ZpassesError
from zpasses.tools.matrix.cuda_stubs import replace_cuda_libraries

__all__ = ["CHECKOUT", "EnvironmentFailedError", "Pair", "find_python", "make_environment"]

CHECKOUT = Path(__file__).resolve().parents[2]


class EnvironmentFailedError(ZpassesError):
    """An environment cannot be made."""


@dataclass(frozen=True)
class Pair:
    """A version of torch and a version of Python."""

    torch: str
    """Such as "2.15", which takes the newest 2.15.x, or "2.15.0"."""
    python: str
    """Such as "3.13"."""

    @property
    def folder(self) -> str:
        return f"torch-{self.torch}-python-{self.python}"

    @property
    def requirement(self) -> str:
        """What pip is asked for.

        A range takes a CPU build where pip's configuration names a place that has one, because a
        local version such as 2.15.0+cpu sorts above the plain one.
        """
        numbers = self.torch.split(".")
        if len(numbers) > 2:
            return f"torch=={self.torch}"
        return f"torch>={self.torch},<{numbers[0]}.{int(numbers[1]) + 1}.dev0"


def find_python(version: str) -> str:
    """Returns the interpreter of a version: from PATH, or from pyenv.

    Raises:
        EnvironmentFailedError: if there is none that can make virtual environments.
    """
    name = f"python{version}"
    found = [shutil.which(name)]
    if pyenv := shutil.which("pyenv"):
        done = subprocess.run([pyenv, "prefix", version], capture_output=True, text=True)
        if done.returncode == 0:
            found.append(str(Path(done.stdout.strip()) / "bin" / name))
    for python in found:
        # pyenv's own commands fail for versions that are not chosen.
        if python and _succeeds(python, "-c", "import ensurepip, venv"):
            return python
    raise EnvironmentFailedError(
        f"found no {name} that can make virtual environments, on PATH or in pyenv; install Python "
        f"{version}, or leave it out of --python."
    )


def _succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def make_environment(pair: Pair, folder: Path) -> str:
    """Installs torch, and this checkout with its tools for development, into an environment.

    An environment that is complete is left as it is.

    Args:
        folder: of the environment.

    Returns:
        The interpreter of the environment.

    Raises:
        EnvironmentFailedError: if Python or a package is missing.
    """
    python = str(folder / "bin" / "python")
    complete = folder / "complete"
    if complete.exists():
        return python
    _run(find_python(pair.python), "-m", "venv", "--clear", str(folder))
    pins = folder / "constraints.txt"
    pins.write_text("")
    # In place of constraints of the user's, which may pin another torch.
    environment = {**os.environ, "PIP_CONSTRAINT": pins.as_uri()}
    pip = (python, "-m", "pip", "install", "--quiet")
    _run(*pip, "--no-deps", pair.requirement, environment=environment)
    (packages,) = folder.glob("lib/python3*/site-packages")
    replace_cuda_libraries(packages)
    (installed,) = packages.glob("torch-*.dist-info")
    pins.write_text(f"torch=={installed.name.removesuffix('.dist-info').partition('-')[2]}\n")
    _run(*pip, "-e", f"{CHECKOUT}[dev]", environment=environment)
    _run(python, "-c", "import torch, zpasses")
    complete.touch()
    return python


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if not re.match("WARNING", line)]
        raise EnvironmentFailedError(
            f"{' '.join(command[:4])} ... failed with status {done.returncode}:\n"
            + "\n".join(lines[-20:])
        )
