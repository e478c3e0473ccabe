"""Paths that Orbax or TensorStore take for others: refused at the request, before anything is written."""

import os
from pathlib import Path

import pytest

from jaxdist import checkpoints, train
from jaxdist.config import RequestError
from jaxdist.config.values import path_error
from jaxdist.launch import main as launch

NAMES = {
    "back\\slash": "has a '\\' in its full path",
    "[1]": "has a '[' in its full path",
    "a*": "has a '*' in its full path",
    "why?": "has a '?' in its full path",
    "gs:/bucket": "has a folder whose name ends with a colon",
    os.fsdecode(b"\xff"): "UTF-8",
    "a\0b": "has a NUL character",
}

COMMANDS = {
    "train": lambda path: train.main([f"--run-dir={path}"]),
    "slurm": lambda path: launch(["slurm", "--nodes=1", "--time=1:00:00", f"--run-dir={path}"]),
    "local": lambda path: launch(["local", "--processes=2", f"--run-dir={path}"]),
    "init_from": lambda path: train.main([f"--init-from={path}"]),
    "checkpoints": lambda path: checkpoints.main([str(path)]),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_path_that_would_be_another_is_refused(tmp_path, monkeypatch, name, command):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError) as error:
        COMMANDS[command](name)
    assert NAMES[name] in str(error.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("a" * 255, ""),
        ("a" * 256, "more than 255 bytes"),
        ("ä" * 127 + "/" + "ä" * 127, ""),
        ("ä" * 128, "more than 255 bytes"),  # half as many characters
        ("ab/" + "ä/" * 1332 + "a", ""),
        ("abc/" + "ä/" * 1332 + "a", "longer than 4000 bytes"),
    ],
    ids=["255", "256", "254 in each of two", "256 in 128 letters", "4000", "4001"],
)
def test_names_and_paths_are_as_long_as_their_bytes(path, problem):
    if problem:
        assert problem in path_error(path)
    else:
        assert path_error(path) == path_error(Path(path)) == ""


def test_the_folder_above_counts_too(tmp_path, monkeypatch):
    (tmp_path / "a\\b").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "a\\b")
    for path in (tmp_path / "a\\b" / "run", tmp_path / "link" / "run"):
        with pytest.raises(RequestError, match="in its full path"):
            train.main([f"--run-dir={path}"])
    monkeypatch.chdir(tmp_path / "a\\b")
    with pytest.raises(RequestError, match="in its full path"):
        train.main(["--run-dir=run"])


@pytest.mark.parametrize("name", ["ü 漢", "a:b", "50%", "x#y", "{a}", "~", "a|b", "s3"])
def test_other_names_are_fine(tmp_path, name):
    from jaxdist.request.checks.files import path_problem

    assert path_problem(tmp_path / name) is None
