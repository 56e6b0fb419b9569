"""What continuous integration does besides the tests: it installs a browser and counts skips."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest

INSTALL = Path(__file__).parents[1] / ".ci" / "install-browser"
BASH = shutil.which("bash")


@pytest.fixture
def machine(tmp_path):
    """Runs the script on a machine with these programs, given by name and text."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(**texts):
        for name in ("env", "touch", "chmod", "timeout"):
            (programs / name).symlink_to(shutil.which(name))
        for name, text in texts.items():
            path = programs / name.replace("_", "-")
            path.write_text(f"#!{BASH}\n{text}\n")
            path.chmod(0o755)
        environment = {"PATH": str(programs)}
        done = subprocess.run(
            [BASH, INSTALL], env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        calls = programs / "calls"
        return done.stdout, calls.read_text().splitlines() if calls.exists() else []

    return run


APT = """
here="${0%/*}"
echo "$@" >>"$here/calls"
for name in chromium chromedriver; do
  [ "$2" != install ] || { touch "$here/$name"; chmod +x "$here/$name"; }
done
"""


@pytest.mark.parametrize(
    "user",
    [{"id": "echo 0"}, {"id": "echo 1000", "sudo": '[ "$1" = -n ] && shift && exec "$@"'}],
    ids=["root", "sudo"],
)
def test_chromium_and_its_driver_are_installed(machine, user):
    said, calls = machine(apt_get=APT, **user)
    assert said == "Installed Chromium for tests of the report page.\n"
    assert calls == ["-qq update", "-qq install --yes chromium chromium-driver"]


def test_nothing_is_installed_where_both_are(machine):
    assert machine(apt_get=APT, id="echo 0", chromium="", chromedriver="") == ("", [])


@pytest.mark.parametrize(
    "programs",
    [
        {"id": "echo 0"},
        {"id": "echo 0", "apt_get": "exit 100"},
        {"id": "echo 1000", "apt_get": APT, "sudo": "echo a password is required >&2; exit 1"},
    ],
    ids=["no apt-get", "no package", "no rights"],
)
def test_it_is_said_where_nothing_can_be_installed(machine, programs):
    said, calls = machine(**programs)
    assert said.startswith("No Chromium: ")
    assert said.endswith("Tests of the report page are skipped.\n")
    assert not calls


def test_skipped_tests_are_counted_by_reason():
    reasons = ["needs a GPU", "needs Chromium", "needs Chromium"]
    skipped = [SimpleNamespace(longrepr=("test_x.py", 7, f"Skipped: {each}")) for each in reasons]
    lines = []
    terminal = SimpleNamespace(stats={"skipped": skipped}, write_line=lines.append)
    conftest.pytest_terminal_summary(terminal)
    assert lines == ["skipped 2: needs Chromium", "skipped 1: needs a GPU"]
    conftest.pytest_terminal_summary(SimpleNamespace(stats={}))
