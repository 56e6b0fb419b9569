"""What the documents say is true: their code runs, their commands exist, their links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from zpasses.options import Options
from zpasses.pipeline import Pass, catalogue
from zpasses.tools.cli.main import cli

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
QUICKSTART = ROOT / "examples" / "quickstart.py"


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def commands():
    lines = [line for path in DOCUMENTS for block in blocks(path, "bash") for line in block.splitlines()]
    return [line.partition("#")[0].strip() for line in lines if line.partition("#")[0].strip()]


def test_the_quickstart_of_the_readme_is_the_example():
    assert QUICKSTART.read_text().split('"""\n\n', 1)[1] == blocks(ROOT / "README.md", "python")[0]


@pytest.mark.processes
@pytest.mark.inductor
def test_the_quickstart_trains_on_two_ranks():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(QUICKSTART)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = dict(re.findall(r"rank (\d): loss ([\d.]+)", done.stdout))
    assert set(losses) == {"0", "1"}
    assert all(float(loss) < 0.3 for loss in losses.values())


def test_the_worked_pass_of_contributing_runs_as_it_stands(capsys):
    namespace = {"__name__": "worked_example"}
    path = ROOT / "CONTRIBUTING.md"
    for block in blocks(path, "python"):
        exec(compile(block, str(path), "exec"), namespace)
    assert "reduce_scatter_tensor" in capsys.readouterr().out


@pytest.mark.parametrize("command", commands())
def test_documented_commands_exist(command):
    if command.startswith("make "):
        done = subprocess.run(["make", "-n", *command.split()[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    elif command.startswith("zpasses "):
        shown = CliRunner().invoke(cli, [command.split()[1], "--help"])
        assert shown.exit_code == 0, shown.output
        assert all(word in shown.output for word in command.split() if word.startswith("-")), shown.output
        return
    else:
        if command.startswith("python examples/"):
            words = [str(ROOT / command.split()[1])]
        else:
            assert command.startswith("python -m zpasses."), f"say in this test how to check {command!r}"
            words = ["-m", *[word for word in command.split()[2:] if not word.startswith("-")][:2]]  # the module and its subcommand
        done = subprocess.run([sys.executable, *words, "--help"], capture_output=True, text=True, timeout=60, check=False)
        options = [word for word in command.split() if word.startswith("--")]
        assert all(option in done.stdout for option in options), done.stdout
    assert done.returncode == 0, done.stderr


def test_links_between_documents_lead_somewhere():
    for path in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_readme_lists_every_option_and_pass():
    text = (ROOT / "README.md").read_text()
    for option in Options.__dataclass_fields__:
        assert f"| `{option}` |" in text
    for name, entry in catalogue().items():
        assert f"`{name}" in text
        if isinstance(entry, type) and issubclass(entry, Pass):
            assert re.search(rf"\| `{name}[`{{].*\| {entry.level.value} \|", text), name


def test_files_named_in_the_design_exist():
    for name in re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "design.md").read_text()):
        assert (ROOT / name).exists() or (ROOT / "zpasses" / name).exists(), name
