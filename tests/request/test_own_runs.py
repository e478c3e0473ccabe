"""A folder that is none of a run: whether it is there, whether one may look into it, and which runs are near."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxdist.request.own_runs import NAMED, why_no_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(["a", "b", "c"]):
        config = tmp_path / "runs" / name / "config.toml"
        config.parent.mkdir(parents=True)
        config.write_text("")
        os.utime(config, (1000 - age, 1000 - age))
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("runs/d", "run folder 'runs/d' does not exist; there are runs/a, runs/b, runs/c"),
        ("d", "run folder 'd' does not exist"),
        ("no/such/d", "run folder 'no/such/d' does not exist"),
        ("file", "run folder 'file' is no folder"),
        ("runs", "'runs' is not the folder of a run: it has no config.toml, but holds runs/a, runs/b, runs/c"),
        ("runs/other", "'runs/other' is not the folder of a run: it has no config.toml"),
    ],
)
def test_the_sentence_says_what_is_there(runs, name, sentence):
    assert why_no_run(Path(name)) == sentence


def test_of_many_runs_the_newest_are_named(runs):
    for number in range(10):
        config = runs / "runs" / f"n{number}" / "config.toml"
        config.parent.mkdir()
        config.write_text("")
    said = why_no_run(Path("runs"))
    assert said.count("runs/n") == NAMED
    assert said.endswith(", 8 more")


WITHOUT_RIGHTS = """\
from jaxdist.train import main as train
from jaxdist.evaluate import main as evaluate
from jaxdist.compare import main as compare
from jaxdist.doctor.__main__ import main as doctor
from jaxdist.request.commandline import outcome
print([outcome(main, ["closed"]) for main in (train, evaluate, compare, doctor)])
"""


def test_a_folder_without_permission_is_not_called_another_thing(runs):
    closed = runs / "closed"
    closed.mkdir()
    (closed / "config.toml").write_text("")
    command = [sys.executable, "-c", WITHOUT_RIGHTS]
    if os.geteuid() == 0:
        # Root may look anywhere, unless it gives that up; then it has the rights of an owner, as everybody has.
        os.chown(closed, 65534, 65534)
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    closed.chmod(0o700 if os.geteuid() == 0 else 0)
    result = subprocess.run(command, capture_output=True, text=True, cwd=runs)
    closed.chmod(0o755)
    assert result.stdout.strip() == "[2, 2, 2, 2]", result.stderr
    said = result.stderr.splitlines()
    assert len(said) == 4, said
    assert all("'closed' cannot be looked into: no permission" in line for line in said), said
