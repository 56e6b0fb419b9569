"""Commands in a process of their own that has 1 GiB of address space, as many as are given.

`python -m tests.tools.limited` reads a JSON list of commands, and writes the figures of them all.
"""

import json
import resource
import subprocess
import sys
import time
import traceback

MEMORY_LIMIT = 1 << 30
LIMIT_S = 25  # a command takes 5 at most, but the machine may be slow


def run_limited(commands):
    """Runs commands of `zpasses`, and returns {"count", "slowest_s", "peak_bytes", "refused"}.

    Fails if one of them raises, takes 25 s of processor time, or does not fit into the memory.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.limited"],
        input=json.dumps(commands),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout[-500:], done.stderr[-1500:])
    found = json.loads(done.stdout)
    assert found["failures"] == []
    assert found["count"] == len(commands)
    return found


def main():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    from click.testing import CliRunner

    from zpasses.tools.cli.main import cli

    assert "torch" not in sys.modules  # it alone takes more than the limit
    count = refused = 0
    slowest, failures = 0.0, []
    for command in json.load(sys.stdin):
        started = time.process_time()
        done = CliRunner().invoke(cli, command)
        took = time.process_time() - started
        slowest, count = max(slowest, took), count + 1
        refused += done.exit_code == 2
        if not isinstance(done.exception, SystemExit | None):
            text = "".join(traceback.format_exception(*done.exc_info))
            failures.append([command, text[-1000:]])
        elif done.exit_code not in (0, 1, 2) or took >= LIMIT_S:
            failures.append([command, f"exit status {done.exit_code} after {took:.1f} s"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    figures = {"count": count, "refused": refused, "slowest_s": slowest, "peak_bytes": peak}
    print(json.dumps({**figures, "failures": failures[:3]}))


if __name__ == "__main__":
    main()
