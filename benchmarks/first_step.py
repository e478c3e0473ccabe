"""How long the first run of the tutorial takes to its first step, with and without kept programs.

    python benchmarks/first_step.py [--times 2] [--steps 2] [--rows ROW ...] [--out RESULTS.txt] [-- OPTION ...]

OPTIONs are those of train; the whole first command of the README is

    python benchmarks/first_step.py --steps 150 --rows first cold -- --mesh 2x1x1

Each row starts the command once, with a cache folder of its own:

    first      nothing is kept yet: the text is tokenized, programs are compiled
    no cache   tokens are kept, programs are not (JAX_ENABLE_COMPILATION_CACHE=false)
    cold       tokens are kept, programs are compiled and then kept
    warm       both are kept

Seconds are those of the clock, and of the processor in this process and its children, to the line of the first step and
to the end. On a machine that does something else, too, only the latter say much.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROWS = ("first", "no cache", "cold", "warm")


def measure(row: str, folder: Path, steps: int, options: list[str]) -> str:
    """Run the command with these options, and describe it in a line."""
    if row in ("first", "cold"):
        for programs in folder.glob("cache/programs*"):
            shutil.rmtree(programs)
    environment = {**os.environ, "JAXDIST_CACHE": str(folder / "cache"), "JAX_PLATFORMS": "cpu"}
    if row == "no cache":
        environment["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    command = [sys.executable, "-m", "jaxdist.train", "--run-dir", str(folder / "run")]
    command += ["--train.steps", str(steps), "--log.every", "1", *options]
    shutil.rmtree(folder / "run", ignore_errors=True)
    began = time.monotonic()
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, bufsize=1)
    assert process.stderr is not None
    first = None
    for line in process.stderr:
        if line.startswith("step 1/"):
            first = time.monotonic() - began, used(process.pid)
    _, status, usage = os.wait4(process.pid, 0)
    clock = time.monotonic() - began
    assert status == 0, f"{command} ended with {status}"
    assert first, f"{command} printed no first step"
    whole = usage.ru_utime + usage.ru_stime
    return (
        f"{row:<10} first step {first[0]:6.1f} s, processor {first[1]:5.1f} s; "
        f"{steps} steps {clock:6.1f} s, processor {whole:5.1f} s; load {os.getloadavg()[0]:.1f}"
    )


def used(pid: int) -> float:
    """Return the seconds of the processor that a process and its ended children have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("options", nargs="*", help="of train, after --")
    asked = parser.parse_args()
    lines = [
        f"$ python {shlex.join(['benchmarks/first_step.py', *sys.argv[1:]])}",
        f"jax {version('jax')}, Python {sys.version.split()[0]}, {len(os.sched_getaffinity(0))} cores",
    ]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory() as folder:
        once = [row for row in asked.rows if row == ROWS[0]]
        again = [row for row in asked.rows if row != ROWS[0]]
        for row in [*once, *again * asked.times]:
            lines.append(measure(row, Path(folder), asked.steps, asked.options))
            print(lines[-1], flush=True)
            if asked.out:
                asked.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
