"""Ctrl-C at any moment of a command, also while modules are imported: no traceback."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COMMANDS = [
    "train",
    "launch",
    "evaluate",
    "generate",
    "explain",
    "plan",
    "checkpoints",
    "data",
    "doctor",
    "bench",
    "lab",
]

CTRL_C = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(5)\n"


def interrupted(folder: Path, module: str, command: list[str]) -> subprocess.CompletedProcess:
    """`command`, which gets Ctrl-C while it imports `module`."""
    (folder / f"{module}.py").write_text(CTRL_C)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    return subprocess.run(
        heeding(command), env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def heeding(command: list[str]) -> list[str]:
    """Python with that command line, where Ctrl-C is not ignored, as it is when the tests run in the background."""
    heed = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    return [sys.executable, "-c", heed, sys.executable, *command]


@pytest.mark.parametrize("command", ["jaxdist", *(f"jaxdist.{command}" for command in COMMANDS)])
def test_while_a_command_is_imported(tmp_path, command):
    done = interrupted(tmp_path, "pydantic", ["-m", command])
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_while_the_program_of_that_name_is_imported(tmp_path):
    (tmp_path / "jaxdist").write_text("from jaxdist.__main__ import main\nmain()\n")
    done = interrupted(tmp_path, "pydantic", [str(tmp_path / "jaxdist")])
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("words", [["jaxdist.train", "--run-dir=run"], ["jaxdist.explain"], ["jaxdist", "train"]])
def test_while_a_command_imports_jax(tmp_path, words):
    done = interrupted(tmp_path, "jax", ["-m", *words])
    assert (done.returncode, done.stdout) == (85, "")
    assert done.stderr.endswith(": interrupted\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("program", ["import jaxdist", "import sys; sys.argv = ['-m']; import jaxdist"])
def test_a_program_that_uses_the_library_keeps_its_own_handler(program):
    program += "\nimport signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run(heeding(["-c", program]), check=True, cwd=ROOT)
