"""Tests of the command line."""

import errno
import inspect
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.programs import start_python
from tests.zpasses.inspect.real import SCHEDULE, real_dump
from zpasses.inspect import CollectiveRows, Limits
from zpasses.inspect import open as open_dump
from zpasses.inspect.view import Table
from zpasses.pipeline.pipeline import Pipeline, catalogue
from zpasses.tools.cli.catalogue import pass_view
from zpasses.tools.cli.main import cli


@pytest.fixture(scope="module")
def dump():
    return str(real_dump()[0])


def zpasses(*arguments, **environment):
    return start_python("-m", "zpasses", *arguments, variables=environment)


def run(*arguments):
    """Run a command in this process, which is faster."""
    return CliRunner().invoke(cli, arguments)


def values(*arguments):
    done = run(*arguments, "--json")
    assert done.exit_code in (0, 1), done.output
    found = json.loads(done.stdout)
    assert found.pop("schema") == 2
    return found["graphs"] if set(found) == {"graphs"} else found


# --- as a process ---------------------------------------------------------------------------------
def test_reading_a_dump_loads_no_torch(dump):
    code = (
        "import sys; from zpasses.tools.cli.main import cli\n"
        f"for command in ('list', 'show', 'diff', 'collectives', 'memory'): cli([command, "
        f"{dump!r}], standalone_mode=False)\n"
        f"cli(['html', {dump!r}, '-o', {os.devnull!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = start_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_exit_status_of_diff_tells_equal_from_different(dump):
    assert zpasses("diff", dump, dump).returncode == 0
    assert zpasses("diff", dump, "joint", "--pass", "merge-reads").returncode == 0
    assert zpasses("diff", dump, "forward").returncode == 1
    nothing = zpasses("diff", dump, "forwad")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert nothing.stderr.startswith("zpasses: ")
    assert 'Did you mean "forward"?' in nothing.stderr
    assert "Traceback" not in nothing.stderr


_LEAVES = """
import atexit, sys, threading, time
from zpasses.tools.cli.main import main
from zpasses.pipeline.pipeline import Pipeline, catalogue
from zpasses.tools.cli.catalogue import pass_view
from zpasses.tools.cli.main import cli

class Freed:
    def __del__(self):
        print("freed")

def work():
    time.sleep(0.5)
    print("worked")

def started(arguments):
    atexit.register(print, "at exit")
    threading.Thread(target=work).start()
    return arguments

held = Freed()
cli.parse_args = lambda context, arguments, parse=cli.parse_args: parse(context, started(arguments))
sys.argv = ["zpasses", "--version"]
main()
"""


@pytest.mark.slow(quick="the other tests of test_cli.py")
def test_a_process_ends_without_freeing_its_memory_after_threads_and_handlers():
    done = start_python("-c", _LEAVES)
    assert done.returncode == 0, done.stderr
    version, *lines = done.stdout.splitlines()
    assert version.startswith("zpasses ")
    assert lines == ["worked", "at exit"]


def test_console_script_is_installed():
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="zpasses")
    assert script.value == "zpasses.tools.cli.main:main"


def on_a_terminal(*arguments, **environment):
    """Output of a command that runs on a pseudo-terminal."""
    main, side = pty.openpty()
    env = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    env |= {"TERM": "xterm", **environment}
    command = [sys.executable, "-m", "zpasses", *arguments]
    process = subprocess.Popen(command, stdout=side, stderr=side, env=env)
    os.close(side)
    shown = b""
    while True:
        try:
            block = os.read(main, 65536)
        except OSError:  # Linux reports a closed terminal this way
            block = b""
        if not block:
            break
        shown += block
    os.close(main)
    assert process.wait(60) == 0
    return shown.decode()


def test_colors_are_printed_only_on_capable_terminals(dump):
    show = ("show", dump, "forward")
    assert "\x1b[" in on_a_terminal(*show)
    assert "\x1b[" not in on_a_terminal(*show, NO_COLOR="1")
    assert "\x1b[" not in on_a_terminal(*show, TERM="dumb")
    assert "\x1b[" not in zpasses(*show).stdout


# --- reading --------------------------------------------------------------------------------------
def test_list_names_graphs_and_passes(dump):
    shown = run("list", dump).output
    for word in ("joint", SCHEDULE, "Rank 0; the dump has ranks 0, 1"):
        assert word in shown
    graphs = values("list", dump)["compiles"][0]["graphs"]
    assert [graph["name"] for graph in graphs] == ["captured", "joint", "forward", "backward"]
    assert graphs[2]["steps"][1]["run"]["options"]["memory_budget"] == "1MiB"


def test_show_filters(dump):
    filters = ("--after", "0", "--param", "layers.1.*", "--op", "all_gather*")
    shown = run("show", dump, "forward", *filters).output
    assert shown.count("\n") == 2
    assert "gather: layers.1.weight" in shown
    nodes = values("show", dump, "forward", "--op", "output")[0]["nodes"]
    assert [node["op"] for node in nodes] == ["output"]
    (started,) = values("show", dump, "forward", "--node", "all_gather*")[0]["nodes"]
    assert started["collective"]["kind"] == "all_gather_into_tensor_coalesced"
    assert len(run("show", dump, "forward", "--collectives").output.splitlines()) == 1 + 4


def test_show_without_a_graph_shows_the_graphs_on_which_the_pass_ran(dump):
    def graphs(*arguments):
        return [each["graph"] for each in values("show", dump, *arguments)]

    assert graphs("--after", "schedule") == ["forward", "backward"]
    assert graphs() == ["captured", "joint", "forward", "backward"]
    short, full = (
        run("show", dump, "forward", "--node", "output", *more).output for more in ((), ("--full",))
    )
    assert "more" in short
    assert "more" not in full


def test_diff_shows_the_changes_of_a_pass(dump):
    shown = run("diff", dump, "backward", "--pass", "schedule")
    assert shown.exit_code == 1
    assert shown.output.startswith("graph ")  # the figures of both graphs come first
    assert f"\n0/0 backward, after {SCHEDULE}: " in shown.output
    assert "+ inserted all_gather_into_tensor_coalesced_default = " in shown.output
    found = values("diff", dump, "backward", "--pass", "schedule")
    assert not found["same"]
    kinds = [change["kind"] for change in found["graphs"][0]["changes"]]
    assert found["graphs"][0]["counts"]["inserted"] == kinds.count("inserted")
    limited = run("diff", dump, "backward", "--pass", "schedule", "--limit", "1").output
    assert "more inserted (--limit 0 shows all)" in limited


def test_diff_between_dumps_and_ranks(dump, tmp_path):
    from tests.zpasses.inspect.real import dump_training_step

    assert run("diff", dump, "--ranks", "0", "1").exit_code == 0
    dump_training_step(
        tmp_path / "other",
        pipeline="merge-reads,gather-params,reduce-grads,reshard-after-forward{keep=nothing}",
    )
    different = run("diff", dump, str(tmp_path / "other"))
    assert different.exit_code == 1
    assert "0/0 joint, after reshard-after-forward{keep=nothing}: no change" in different.output
    assert run("diff", dump, str(tmp_path / "other"), "joint").exit_code == 0
    assert run("diff", dump, str(tmp_path / "other"), "forward", "--after", "0").exit_code == 0
    dump_training_step(tmp_path / "shorter", pipeline="gather-params,reduce-grads")
    shorter = run("diff", str(tmp_path / "other"), str(tmp_path / "shorter"), "joint")
    assert "{keep=nothing} against after reduce-grads" in shorter.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["diff", "DUMP", "--ranks", "0", "1", "--rank", "0"], "omit the second dump and --rank"),
        (
            ["diff", "DUMP", "--ranks", "0", "1", "--pass", "schedule"],
            "--after selects the graphs to compare",
        ),
        (["diff", "DUMP", "forward", "--after", "schedule"], "--pass shows the changes of a pass"),
        (["diff", "DUMP", "--pass", "schedul"], 'Did you mean "schedule"?'),
        (["show", "DUMP", "--rank", "7"], "contains only ranks 0, 1, and not rank 7"),
        (["show", "DUMP", "--compile", "3/0"], "has no compile '3/0'"),
        (["memory", "DUMP", "forward", "--at", "mmm"], "has no node 'mmm'"),
        (["list", "/nowhere"], "/nowhere does not exist"),
        (["diff", "DUMP", "/nowhere"], "/nowhere does not exist"),
        (["lst", "DUMP"], 'Did you mean "list"?'),
        (["timeline", "DUMP", "-o", "/nowhere/trace.json"], "cannot write /nowhere/trace.json"),
    ],
)
def test_errors_are_messages_with_exit_status_2(dump, arguments, message):
    done = run(*(dump if each == "DUMP" else each for each in arguments))
    assert done.exit_code == 2
    assert message in done.output


def test_collectives_and_memory_have_totals(dump):
    both = values("collectives", dump)
    assert [each["graph"] for each in both] == ["forward", "backward"]
    for each in both:
        assert each["totals"]["exposed_us"] == pytest.approx(
            sum(row["exposed_us"] for row in each["collectives"])
        )
    (memory,) = values("memory", dump, "backward")
    assert memory["peak_bytes"] == max(memory["live_bytes"]) == sum(memory["by_kind"].values())
    assert [step["after"] for step in memory["steps"]] == [None, SCHEDULE]
    assert (
        "smaller buffers (--limit 0 shows all)"
        in run("memory", dump, "backward", "--limit", "1").output
    )
    assert values("memory", dump, "backward", "--at", "output")[0]["at"] == "output"


def test_timeline_and_page_are_written(dump, tmp_path):
    assert run("timeline", dump, "-o", str(tmp_path / "trace.json")).exit_code == 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert run("html", dump, "-o", str(tmp_path / "report.html")).exit_code == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert '"traceEvents"' in run("timeline", dump, "forward", "-o", "-").output


def test_completion_is_printed_for_each_shell():
    for shell in ("bash", "zsh", "fish"):
        assert "_ZPASSES_COMPLETE" in run("completion", shell).output


# --- the catalogue --------------------------------------------------------------------------------
def test_catalogue_lists_every_pass_with_level_and_options():
    listed = values("passes")
    assert {each["name"] for each in listed["passes"]} | set(listed["pipelines"]) == set(
        catalogue()
    )
    (schedule,) = [each for each in listed["passes"] if each["name"] == "schedule"]
    assert schedule["level"] == "partitioned"
    assert {option["name"]: option["default"] for option in schedule["options"]}["cap_mb"] == "none"
    assert "Merge and move collectives" in run("passes").output


def test_page_of_a_pass_shows_the_graph_before_and_after_it():
    page = values("passes", "gather-params")
    assert "Lower every" in page["document"] or "unshard" in page["document"]
    (example,) = page["example"]
    assert "zpasses.unshard" in example["before"]
    assert "zpasses.unshard" not in example["after"]
    assert "all_gather_into_tensor" in example["after"]


def test_page_of_a_pipeline_names_its_passes_and_unknown_names_are_refused():
    assert values("passes", "zero3")["passes"][2] == "gather-params"
    for name, advice in (("schedul", 'Did you mean "schedule"?'), ("bucket", "plan=single")):
        done = run("passes", name)
        assert done.exit_code == 2
        assert advice in done.output


def test_trusted_lifts_the_limits_of_every_reading_command(dump, monkeypatch, tmp_path):
    monkeypatch.setattr(Limits.__init__, "__defaults__", (1000, *Limits.__init__.__defaults__[1:]))
    for command in ("list", "show", "diff", "collectives", "memory", "timeline", "html"):
        output = ("-o", str(tmp_path / "out")) if command in ("timeline", "html") else ()
        refused = run(command, dump, *output)
        assert refused.exit_code == 2
        assert "than the limit of 1,000 (Limits(file_bytes=...)). To read" in refused.output
        assert run(command, dump, "--trusted", *output).exit_code in (0, 1)


# --- tables, widths and completion ----------------------------------------------------------------
def test_collectives_are_sorted_filtered_and_cut(dump):
    everything = values("collectives", dump, "backward")[0]["collectives"]
    found = values("collectives", dump, "backward", "--sort", "bytes", "--limit", "2")
    sizes = sorted((each["nbytes"] for each in everything), reverse=True)
    assert [each["nbytes"] for each in found[0]["collectives"]] == sizes[:2]
    assert found[0]["totals"]["collectives"] == len(everything)
    exposed = values("collectives", dump, "backward", "--exposed")[0]["collectives"]
    assert exposed == [each for each in everything if each["exposed_us"]]
    text = run("collectives", dump, "backward", "--limit", "1").output
    assert f"and {len(everything) - 1} more (--limit 0 shows all)." in text


def test_collectives_have_modules_and_sources_on_request(dump):
    plain = values("collectives", dump, "forward")[0]["collectives"][0]
    assert "modules" not in plain
    assert "sources" not in plain
    found = values("collectives", dump, "forward", "--module", "--source")[0]["collectives"]
    for each in found:
        assert each["modules"] == list(
            dict.fromkeys(name.rpartition(".")[0] for name in each["params"])
        )
        assert all("real.py:" in source for source in each["sources"])
        assert each["sources"]
    assert "real.py:" in run("collectives", dump, "forward", "--source").output


def test_memory_by_module_adds_up(dump):
    found = values("memory", dump, "backward", "--by", "module")[0]
    assert abs(sum(found["by_module"].values()) - found["nbytes"]) <= len(found["by_module"])
    text = run("memory", dump, "backward", "--by", "module").output
    assert "layers.*" in text
    assert "allocated by" not in text


def test_tables_fit_a_terminal_of_80_columns_and_are_whole_in_a_pipe(dump):
    opened = open_dump(dump)
    views = (
        opened.overview(),
        opened.memory(),
        opened.memory(by="module"),
        opened.collectives(),
        opened.collectives(show=CollectiveRows(source=True, module=True)),
        opened.diff(),
    )
    for view in views:
        tables = [part for part in view.parts if isinstance(part, Table)]
        assert tables, view.title
        for each in tables:
            for width in (80, 100, 160):
                assert max(map(len, each.text(width=width).splitlines())) <= width, view.title
            assert "…" not in each.text()
            assert each.text(width=1000) == each.text()


def completions(*words):
    from click.shell_completion import ShellComplete

    return [
        each.value
        for each in ShellComplete(cli, {}, "zpasses", "_X").get_completions(
            list(words[:-1]), words[-1]
        )
    ]


def test_graphs_passes_nodes_and_compiles_are_completed(dump, tmp_path):
    assert completions("show", dump, "fo") == ["forward"]
    assert "gather-params" in completions("show", dump, "joint", "--after", "")
    assert completions("diff", dump, "joint", "--pass", "gat") == ["gather-params"]
    assert completions("memory", dump, "--compile", "0") == ["0/0"]
    assert "output" in completions("memory", dump, "backward", "--at", "out")
    assert completions("show", str(tmp_path), "fo") == []


def test_every_pass_fits_80_columns():
    for entry in catalogue().values():
        if not isinstance(entry, Pipeline):
            document = inspect.getdoc(inspect.getmodule(entry))
            graphs = document.partition("\nBefore")[2].partition("\n\n")[0]
            assert max(map(len, graphs.splitlines()), default=0) <= 80, entry.name
    shown = pass_view("schedule").text(width=80)
    assert max(map(len, shown.splitlines())) <= 80


needs_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, of Linux")


@needs_full
def test_a_full_disk_is_a_message(dump):
    for command in ("html", "timeline"):
        done = run(command, dump, "-o", "/dev/full")
        assert done.exit_code == 2
        assert done.output == (
            "zpasses: cannot write /dev/full: No space left on device; free some space, or name a "
            "file elsewhere with -o.\n"
        )
    for arguments in (["list", dump], ["--help"]):
        with open("/dev/full", "w") as full:
            command = [sys.executable, "-m", "zpasses", *arguments]
            done = subprocess.run(
                command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=900, check=False
            )
        assert done.returncode == 2
        assert done.stderr == (
            "zpasses: cannot write the output, or a temporary file: No space left on device; free "
            "some space.\n"
        )


def test_a_page_that_a_full_disk_cuts_is_removed(dump, tmp_path, monkeypatch):
    def cut(self, text, encoding):
        self.write_bytes(text[:100].encode())
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", cut)
    done = run("html", dump, "-o", str(tmp_path / "report.html"))
    assert "No space left on device; free some space" in done.output
    assert list(tmp_path.iterdir()) == []
