"""Runs an example that trains, kills it at a step, and starts it again."""

from pathlib import Path

from tests.programs import run_program

EXAMPLES = Path(__file__).parents[2] / "examples"
VARIABLES = {"HF_HUB_OFFLINE": "1", "TORCHELASTIC_RUN_ID": "tests"}
KILLER = """
import os, runpy, signal, sys

step, program = int(sys.argv[1]), sys.argv[2]
sys.argv = sys.argv[2:]

def kill():
    os.kill(os.getpid(), signal.SIGKILL)
{install}
runpy.run_path(program, run_name="__main__")
"""


def run_example(program, *options, ranks=2):
    """Run an example in processes like those of torchrun. Returns the output of rank 0."""
    runs = run_program(program, *options, ranks=ranks, variables=VARIABLES)
    assert [each.returncode for each in runs] == [0] * ranks, runs[0].stdout[-3000:]
    return runs[0].stdout


def kill_example(folder, install, step, program, *options):
    """Run an example until every rank is killed after a step.

    Args:
        install: lines of Python that call `kill()` after `step`.
    """
    killer = folder / "killer.py"
    killer.write_text(KILLER.format(install=install))
    runs = run_program(killer, step, program, *options, ranks=2, variables=VARIABLES)
    assert [each.returncode for each in runs] == [-9, -9], runs[0].stdout[-3000:]


def unsharded(program, folder):
    """Write the script without its lines about zpasses, and return it with their number."""
    lines = program.read_text().split("\n")
    kept = [line for line in lines if not line.endswith("# zpasses")]
    plain = folder / f"plain_{program.name}"
    plain.write_text("\n".join(kept))
    return plain, len(lines) - len(kept)
