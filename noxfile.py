"""The quick tests on several versions of torch and Python, each pair in an environment of its own.

    nox -p 3.10 3.13 -t torch-2.13 torch-2.15
    nox -p 3.13 -t torch-2.15 -- tests/zpasses/compat

What follows `--` are arguments of pytest.
"""

import os
from pathlib import Path

import nox

TORCH = ("2.13", "2.14", "2.15")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
QUICK = ("-n", "2", "--dist", "worksteal", "-m", "not slow", "--hypothesis-profile", "quick")
"""Arguments of pytest in `make test`."""

nox.options.envdir = str(CACHE / "zpasses" / "nox")
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True


@nox.session(python=["3.10", "3.11", "3.12", "3.13"])
@nox.parametrize("torch", [nox.param(each, tags=[f"torch-{each}"]) for each in TORCH])
def tests(session: nox.Session, torch: str) -> None:
    # In place of constraints of the user's, which may pin another torch.
    pins = Path(session.create_tmp()) / "constraints.txt"
    pins.write_text(f"torch=={torch}.*\n")
    session.env.update({"PIP_CONSTRAINT": pins.as_uri(), "PYTHONPATH": None})
    session.install("--no-deps", "torch")
    session.run("python", "-m", "tests.cuda_stubs", silent=True)
    session.install("-e", ".[dev]")
    session.run("python", "-m", "pytest", *QUICK, *session.posargs)
