"""What the documentation says is true: its code runs, its commands exist, its links and names
resolve.

Two kinds of things are not run as they stand, because they take minutes: `make` targets are only
resolved, and of other commands only `--help` is run, which must know the documented options.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import io
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import zpasses
from tests.programs import forked_or_started, run_program
from tests.zpasses.inspect.real import real_dump
from zpasses import Pass, Pipeline
from zpasses.pipeline.pipeline import catalogue
from zpasses.testing import capture_graphs, listing, run_on_ranks
from zpasses.tools.cli.main import cli

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("**/*.md"))]
QUICKSTART = ROOT / "examples" / "quickstart.py"

WITHOUT_RANKS = {"writing-passes.md", "inspecting.md"}
"""Pages whose Python runs in this process. That of all others runs on two ranks."""

READERS_FILES = {"train.py", "train_gpt.py"}
"""Names of scripts that stand for the reader's own."""

README_SETUP = """
from dataclasses import dataclass
from typing import ClassVar
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
import zpasses
from zpasses import Level, Pass, Pipeline
from zpasses.graph import REDUCE_GRAD, calls

model = zpasses.shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(model, backend="zpasses")
chunks, loss_of = torch.ones(3, 4, 8), torch.sum
"""
README_CHECK = """
pipeline = Pipeline((PreciseGrads(), *Pipeline.parse("zero3")))
torch.compile(model, backend="zpasses", options={"pipeline": pipeline})(torch.ones(4, 8)).sum().backward()
"""  # noqa: E501


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def prose(page):
    """The page without its code blocks."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)


def code_spans(page):
    return re.findall(r"`([^`\n]+)`", prose(page))


def texts_of_code(page):
    return [*code_spans(page), *blocks(page, "bash")]


# --- Python ---------------------------------------------------------------------------------------
def test_the_quickstart_of_the_readme_is_the_example():
    assert QUICKSTART.read_text().split('"""\n\n', 1)[1] == blocks(README, "python")[0]


@forked_or_started
@pytest.mark.processes
@pytest.mark.inductor
def test_the_quickstart_trains_on_two_ranks(forked):
    ranks = run_program(QUICKSTART, ranks=2, forked=forked)
    for done in ranks:
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    said = "".join(done.stdout for done in ranks)
    losses = dict(re.findall(r"rank (\d): loss ([\d.]+)", said))
    assert set(losses) == {"0", "1"}
    assert all(float(loss) < 0.3 for loss in losses.values())


def _without_code_generation(compile_, *args, **kwargs):
    """torch.compile with graphs that run without a compiler, which is quicker; the passes are the
    same.
    """
    if kwargs.get("backend") == "zpasses":
        kwargs["options"] = {"codegen": "eager", **kwargs.get("options", {})}
    else:
        kwargs.setdefault("backend", "aot_eager")
    return compile_(*args, **kwargs)


def _at_their_lines(page, snippets):
    """Snippets moved to their lines of the page, so that a traceback shows where they stand."""
    text = page.read_text()
    return ["\n" * text.partition(each)[0].count("\n") * (each in text) + each for each in snippets]


def _run_snippets_with_trainers(name, snippets, folder):
    """Their processes look as if torchrun had started them, and write into a folder."""
    from tests.zpasses.integrations import training  # imports the trainers

    training.as_started_by_torchrun()
    os.chdir(folder)
    _run_snippets(name, snippets)


def _run_snippets(name, snippets):
    compile_ = torch.compile
    namespace = {"__name__": "snippets"}
    replaced = functools.partial(_without_code_generation, compile_)
    with mock.patch.object(torch, "compile", replaced):
        for snippet in snippets:
            exec(compile(snippet, name, "exec"), namespace)


@pytest.mark.processes
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page,
            marks=[pytest.mark.slow(quick="docs/checkpoints.md")] * (page.name == "trainers.md"),
        )
        for page in PAGES
        if page.name not in WITHOUT_RANKS and blocks(page, "python")
    ],
    ids=name_of,
)
def test_snippets_run_on_two_ranks(page, tmp_path):
    snippets = blocks(page, "python")
    if page == README:  # the quickstart has a test of its own
        snippets = [README_SETUP, *snippets[1:], README_CHECK]
    snippets = _at_their_lines(page, snippets)
    if page.name == "trainers.md":
        for package in ("accelerate", "lightning", "peft", "transformers"):
            pytest.importorskip(package)
        run_on_ranks(_run_snippets_with_trainers, str(page), snippets, tmp_path, timeout_s=240)
    else:
        run_on_ranks(_run_snippets, str(page), snippets)


def test_the_worked_pass_runs_and_prints_what_the_page_shows(capsys):
    page = DOCS / "writing-passes.md"
    _run_snippets(str(page), _at_their_lines(page, blocks(page, "python")))
    printed = code_of(capsys.readouterr().out)
    for shown in blocks(page, "text"):
        assert code_of(shown) in printed


def test_the_inspector_snippets_run_on_a_dump(tmp_path, monkeypatch):
    shutil.copytree(real_dump()[0], tmp_path / "build" / "demo")
    monkeypatch.chdir(tmp_path)
    page = DOCS / "inspecting.md"
    _run_snippets(str(page), _at_their_lines(page, blocks(page, "python")))


# --- listings -------------------------------------------------------------------------------------
def code_of(text):
    """A listing without comments and white space, so that pages may wrap and align it."""
    return re.sub(r"#.*|\s", "", text)


def test_the_listing_of_the_readme_is_what_the_pass_does():
    (shown,) = blocks(README, "text")
    before, after = shown.split("# after\n")
    model, inputs = nn.Linear(8, 6, bias=False), (torch.ones(4, 8),)
    step = capture_graphs(model, inputs, world_size=2, pipeline=Pipeline.parse("gather-params"))
    assert code_of(before) in code_of(listing(step.before.joint))
    assert code_of(after) in code_of(listing(step.after.joint))


# --- commands -------------------------------------------------------------------------------------
COMMANDS = ("make ", "pip ", "python ", "torchrun ", "zpasses ", "sh ", "pytest ")


def commands():
    """Every documented command, from blocks and from code spans."""
    lines = [
        line
        for page in PAGES
        for block in blocks(page, "bash")
        for line in block.replace("\\\n", " ").splitlines()
    ]
    lines += [span for page in PAGES for span in code_spans(page) if span.startswith(COMMANDS)]
    words = [shlex.split(line, comments=True) for line in lines]
    return sorted({shlex.join(each) for each in words if each})


@pytest.mark.filterwarnings("ignore:.*found in sys.modules.*:RuntimeWarning")
@pytest.mark.parametrize("command", commands())
def test_documented_commands_exist(command, pytestconfig):
    program, *words = shlex.split(command)
    for option, value in itertools.pairwise(words):
        if option == "--pipeline":
            Pipeline.parse(value)
    if program == "make":
        done = subprocess.run(
            ["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
    elif program == "pip":
        assert words[0] == "install"
        assert any(each.split("[")[0] == "." for each in words), "installs only this project"
    elif program == "sh":
        assert (ROOT / words[0]).exists()
    elif program == "pytest":
        for word in words:
            option = word.startswith("--") and word[2:].replace("-", "_")
            assert option in vars(pytestconfig.option) if option else (ROOT / word).exists(), word
    elif program == "nox":
        drawn = (ROOT / "noxfile.py").read_text()
        for word in words:
            assert word in ("-p", "-t") or f'"{word.removeprefix("torch-")}"' in drawn, word
    elif program == "zpasses":
        _check_zpasses(words)
    else:
        assert program in ("python", "torchrun"), f"say in this test how to check {command!r}"
        _check_python(_without_options_of_torchrun(words) if program == "torchrun" else words)


def _check_zpasses(words):
    if not words[0].isupper():  # zpasses COMMAND --help
        shown = CliRunner().invoke(cli, [words[0], "--help"])
        assert shown.exit_code == 0, shown.output
        script = next((at for at, word in enumerate(words) if word == "torchrun"), len(words))
        assert all(word in shown.output for word in words[:script] if word.startswith("-")), (
            shown.output
        )


def _without_options_of_torchrun(words):
    while words[0].startswith("--"):
        words = words[2:] if words[0] in ("--nproc-per-node", "--nnodes") else words[1:]
    return words


def _check_python(words):
    module = words[0] == "-m"
    program, *arguments = words[module:]
    if program in READERS_FILES or (ROOT / program) == QUICKSTART:  # which has a test of its own
        return
    subcommand = arguments[:1] if program == "zpasses.tools.bench" else []
    shown = _help_of(program if module else str(ROOT / program), subcommand)
    options = [word.partition("=")[0] for word in arguments if word.startswith("--")]
    assert all(option in shown for option in options), shown


def _help_of(program, subcommand):
    """Its help text. It runs in this process, because a new one would import torch first."""
    path = program if program.endswith(".py") else _file_of(program)
    argv = [program, *subcommand, "--help"]
    output = io.StringIO()
    quiet = contextlib.redirect_stdout(output)
    with mock.patch.object(sys, "argv", argv), quiet, pytest.raises(SystemExit) as end:
        runpy.run_path(path, run_name="__main__")
    assert not end.value.code
    return output.getvalue()


def _file_of(module):
    """The file that `python -m` runs. runpy.run_module cannot run what pytest's hook imports."""
    spec = importlib.util.find_spec(module)
    if spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{module}.__main__")
    return spec.origin


# --- links and names ------------------------------------------------------------------------------
def anchors(page):
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_pages_and_their_headings(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert page in PAGES[:2] or target in PAGES or DOCS in target.parents, (
            f"{link}: the site has only docs/"
        )
        assert not anchor or anchor in anchors(target), link


def _resolves(name):
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.import_module(".".join(parts[:end]))
            for part in parts[end:]:
                found = getattr(found, part, None)
            return found is not None
    return False


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_names_files_and_options_in_code_exist(page):
    for text in texts_of_code(page):
        for name in re.findall(r"(?<![\w./])zpasses(?:\.[A-Za-z_]\w*)+", text):
            assert _resolves(name), name
    known = {
        path.name
        for folder in ("zpasses", "passes", "tools", "tests", "examples", "docs")
        for path in (ROOT / folder).rglob("*.py")
    }
    # Files of the package that the page shows.
    shown = set(re.findall(r'^```\w+ title="([^"]+)"', page.read_text(), re.MULTILINE))
    for span in code_spans(page):
        if span in shown:
            continue
        if re.fullmatch(r"(zpasses|passes|tools|tests|examples|docs)/[\w./-]*", span):
            assert (ROOT / span).exists(), span
        elif re.fullmatch(r"[\w/]+\.py", span) and "/" not in span:
            assert span in known | READERS_FILES, span
        elif re.fullmatch(r"[a-z-]+\{[^.{}]*(\.\d[^.{}]*)*\}", span):
            Pipeline.parse(span)


def test_environment_variables_are_read_somewhere():
    source = "".join(
        path.read_text()
        for folder in ("zpasses", "tools")
        for path in (ROOT / folder).rglob("*.py")
    )
    for page in PAGES:
        for variable in re.findall(r"\bZPASSES_[A-Z_]+", page.read_text()):
            assert variable in source, f"{name_of(page)}: {variable}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_prose_wraps_at_100_columns(page):
    """Tables, headings and a word that is longer by itself, such as a link, cannot wrap."""
    for line in prose(page).splitlines():
        if not line.startswith(("|", "#")) and " " in line.strip().removeprefix("- "):
            assert len(line) <= 100, line


# --- completeness ---------------------------------------------------------------------------------
def test_the_readme_is_short_and_names_every_page():
    text = README.read_text()
    assert len(text.splitlines()) <= 150
    for page in DOCS.glob("*.md"):
        assert f"(docs/{page.name})" in text, page.name


def test_every_pass_has_a_section():
    text = (DOCS / "passes.md").read_text()
    for name, entry in catalogue().items():
        if isinstance(entry, type) and issubclass(entry, Pass):
            assert f"\n## `{name}`\n" in text
            assert f"<!-- generated: pass {name} -->" in text


def test_every_argument_is_documented():
    for page, function in (
        ("sharding.md", zpasses.shard),
        ("accumulation.md", zpasses.coalesce_grad_reduction),
        ("copy-engines.md", zpasses.sdma.init),
        ("fit-a-larger-model.md", zpasses.offload_optimizer),
    ):
        text = (DOCS / page).read_text()
        for argument in inspect.signature(function).parameters:
            if argument != "model" or "| `model` |" in text:
                assert re.search(rf"[|(,] ?`?{argument}\b", text), argument
