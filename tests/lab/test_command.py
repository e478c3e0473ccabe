"""`python -m jaxdist.lab`: the list, mistakes, and a run as a program of its own."""

import importlib.util
import json
import os
import sys

import pytest

from jaxdist.config import RequestError
from jaxdist.lab.__main__ import LABS, main
from tests import forks


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_the_list(argv, capsys):
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert all(name in out and about in out for name, about in LABS.items())


@pytest.mark.parametrize("name", LABS)
def test_every_lab_has_a_module_and_help(name, capsys):
    assert importlib.util.find_spec(f"jaxdist.lab.{name.replace('-', '_')}")
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: python -m jaxdist.lab {name} [--json]")
    assert "CONFIG" not in out


@pytest.mark.parametrize(
    ("argv", "problems"),
    [
        (["fsdp-walktrough"], ["there is no lab 'fsdp-walktrough'; did you mean 'fsdp-walkthrough'?"]),
        (["model-parallel", "gpt_tiny"], ["unexpected argument 'gpt_tiny'; options are written --name value"]),
        (["model-parallel", "--jsn"], ["unknown option --jsn; did you mean '--json'?"]),
        (
            ["model-parallel", "--stages", "4"],
            ["unknown option --stages; valid names are --json; --help lists every knob"],
        ),
        (["model-parallel", "--train.steps=5"], ["--train.steps has no effect on this command; leave it out"]),
    ],
)
def test_mistakes(argv, problems):
    with pytest.raises(RequestError) as error:
        main(argv)
    assert [told.partition(" (--help")[0] for told in error.value.problems] == problems


def test_a_program_of_its_own():
    """One JSON object on standard output, and no word on the other."""
    command = [sys.executable, "-m", "jaxdist.lab", "fsdp-walkthrough", "--json"]
    done = forks.run(command, env={**os.environ, "XLA_FLAGS": ""})
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["passed"] is True
