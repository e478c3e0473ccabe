"""`jaxdist train` is `python -m jaxdist.train`, and so are the others: exit codes, and what they print."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxdist.__main__ import COMMANDS, main
from jaxdist.config import Busy

ROOT = Path(__file__).parent.parent.parent
ENTRY = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["jaxdist"]


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """How a command line begins in each form; the console script is what pip writes for the entry point."""
    script = tmp_path_factory.mktemp("bin") / "jaxdist"
    module, name = ENTRY.split(":")
    script.write_text(f"import sys\nfrom {module} import {name}\nif __name__ == '__main__':\n    sys.exit({name}())\n")

    def of(command: str) -> list[list[str]]:
        return [["-m", f"jaxdist.{command}"], [str(script), command]]

    return of


def ended(command: list[str], folder: Path) -> tuple[int, str, str]:
    environment = dict(os.environ, PYTHONPATH=str(ROOT), COLUMNS="100")
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout, done.stderr


LINES = [
    ("train --help", 0),
    ("train --mesh 2x2 --model.layrs 3", 2),
    ("evaluate", 2),
    ("evaluate nowhere --mesh 2x2", 2),
    ("generate empty --top-k -1", 2),
    ("checkpoints empty --json", 0),
    ("compare nowhere", 2),
    ("data nowhere", 2),
    ("explain --parallel.zero 4", 2),
    ("plan --compare 3,2", 2),
    ("launch", 0),
    ("launch locl", 2),
    ("launch local --processes 2 --mesh 3x1x1", 2),
    ("doctor --help", 0),
    ("bench", 0),
    ("bench stepp", 2),
    ("bench step --warmup x", 2),
    ("lab", 0),
    ("lab zero-7p5b-2 --picture nowhere/x.png", 2),
    ("completion bash", 0),
    ("completion tcsh", 2),
]


def test_every_command_has_a_line():
    assert {line.split()[0] for line, _ in LINES} == {name.split()[0] for name in COMMANDS}


FIRST = list({line.split()[0]: (line, code) for line, code in reversed(LINES)}.values())
"""A line for each command, which has a process."""


@pytest.mark.parametrize(("line", "code"), [one for one in LINES if one not in FIRST])
def test_a_line_ends_with_its_code(line, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(line.split()) == code
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1].startswith(f"jaxdist.{line.split()[0]}: ")


@pytest.mark.parametrize(("line", "code"), FIRST)
def test_the_forms_agree(forms, tmp_path, line, code, monkeypatch, capsys):
    """A process of the module and a call of the entry point; for one command a process of the console script too."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").touch()
    command, *words = line.split()
    module, console = [[*form, *words] for form in forms(command)]
    code_of_module, out, err = ended(module, tmp_path)
    assert code_of_module == code, err
    assert (err if code else out) != ""
    if code:
        assert err.splitlines()[-1].startswith(f"jaxdist.{command}: ")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    try:
        code_of_call = main(line.split())
    except SystemExit as help_was_shown:
        code_of_call = help_was_shown.code
    assert (code_of_call, *capsys.readouterr()) == (code, out, err)
    if command == "launch":
        assert ended(console, tmp_path) == (code, out, err)


@pytest.mark.parametrize(("outcome", "code"), [(Busy("In use."), 75), (85, 85), (0, 0)])
def test_exit_codes_of_a_run_are_passed_on(monkeypatch, capsys, outcome, code):
    def train(argv: list[str]) -> int:
        if isinstance(outcome, Busy):
            raise outcome
        return outcome

    monkeypatch.setattr("jaxdist.train.main", train)
    monkeypatch.setattr(sys, "argv", ["jaxdist", "train"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == code


def test_a_reader_that_has_read_enough_is_no_traceback(forms, tmp_path):
    """As in `jaxdist plan --help | head -1`."""
    codes = set()
    for form in [*forms("plan"), ["-m", "jaxdist", "plan"], ["-m", "jaxdist"]]:
        reading, writing = os.pipe()
        os.close(reading)
        environment = dict(os.environ, PYTHONPATH=str(ROOT))
        environment.pop("PYTHONUNBUFFERED", None)  # most users have a buffer, whose flush comes last
        command = [sys.executable, *form, "--help"]
        done = subprocess.run(command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=60)
        os.close(writing)
        assert done.stderr == ""
        codes.add(done.returncode)
    assert codes == {1}
