"""Every option that names a file to write refuses what it must not replace, before any work: a row for each of them."""

from __future__ import annotations

import ast
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import jaxdist
from jaxdist import checkpoints, explain, plan
from jaxdist.bench.__main__ import main as bench
from jaxdist.config import RequestError
from jaxdist.data.__main__ import main as data
from jaxdist.lab.__main__ import main as lab
from jaxdist.request import check_output

ROWS = {
    ("checkpoints", "export"): (checkpoints.main, "RUN --force --export=FILE", ".safetensors"),
    ("data", "export"): (data, "--model.vocab=300 --force --export=FILE", ".bin"),
    ("explain", "picture"): (explain.main, "--picture=FILE", ".png"),
    ("plan", "picture"): (plan.main, "--picture=FILE", ".png"),
    ("plan", "fit_out"): (plan.main, "--fit=steps.json --fit-out=FILE", ".toml"),
    ("plan", "save"): (plan.main, "--save=FILE", ".toml"),
    ("lab", "output"): (lab, "--all --output=FILE", ".html"),
    ("lab CLAIM", "picture"): (lab, "zero-7p5b-2 --picture=FILE", ".png"),
    ("lab all-reduce", "picture"): (lab, "all-reduce --picture=FILE", ".png"),
    ("lab schedules", "picture"): (lab, "schedules --picture=FILE", ".png"),
    ("bench scaling", "picture"): (bench, "scaling cnn_digits --devices=1 --picture=FILE", ".png"),
    ("bench collectives", "fit"): (bench, "collectives --fit=FILE", ".toml"),
    ("bench gpu", "out"): (bench, "gpu --out=FILE", ".json"),
}
"""(command, option) -> (its function, a command line, how such a file is named)."""


def made_as(kind: str, path: Path) -> None:
    """Something at `path` that is no regular file."""
    other = path.parent / "other"
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(path))
    elif kind == "link to a file":
        other.write_text("mine")
        path.symlink_to(other)
    elif kind == "link to nothing":
        path.symlink_to(other)
    elif kind == "link to a device":
        path.symlink_to(os.devnull)


KINDS = {
    "folder": "is a folder; name a file in it, such as",
    "fifo": "is a device, a FIFO or a socket; name a regular file",
    "socket": "is a device, a FIFO or a socket; name a regular file",
    "link to a file": "is a symbolic link; name the file itself",
    "link to nothing": "is a symbolic link; name the file itself",
    "link to a device": "is a symbolic link; name the file itself",
}

BOTH = [(("checkpoints", "export"), "folder"), (("data", "export"), "folder")]
"""What may be a folder as well as a file (tests/huggingface/test_export_folder.py, tests/data/test_token_export.py)."""


@pytest.fixture
def run_folder(tmp_path) -> Path:
    """As a run leaves it, but that it has saved nothing."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "best").mkdir(parents=True)
    (folder / "config.toml").write_text("")
    (folder / "environment.json").write_text("{}")
    return folder


def content(folder: Path) -> dict[str, str | None]:
    """All that lies there, with what is in files."""
    found = sorted(folder.rglob("*"))
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() and not path.is_symlink() else None
        for path in found
    }


def refusal(row: tuple[Callable[[list[str]], int], str, str], path: Path, run_folder: Path) -> str:
    """What is said of `path`; nothing is written anywhere."""
    main, line, _ = row
    before = content(run_folder.parent)
    argv = [word.replace("FILE", str(path)).replace("RUN", str(run_folder)) for word in line.split()]
    with pytest.raises(RequestError) as error:
        main(argv)
    assert content(run_folder.parent) == before
    (problem,) = error.value.problems
    return problem


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name in ROWS for kind in KINDS if (name, kind) not in BOTH]
)
def test_only_regular_files_are_replaced(name, kind, tmp_path, run_folder):
    path = tmp_path / f"out{ROWS[name][2]}"
    made_as(kind, path)
    assert f"'{path}' {KINDS[kind]}" in refusal(ROWS[name], path, run_folder)


def test_no_device_is_replaced():
    """The check alone is asked: a command that failed it could replace the machine's own, as root."""
    with pytest.raises(RequestError, match=rf"^--out '{os.devnull}' {KINDS['fifo']}$"):
        check_output("--out", os.devnull, "gpu.json")


@pytest.mark.parametrize("name", ROWS, ids=" --".join)
def test_nothing_of_a_run_is_replaced(name, tmp_path, run_folder):
    """Nor is anything put among its checkpoints, under another name of the folder either."""
    suffix = ROWS[name][2]
    (tmp_path / "link").symlink_to(run_folder / "checkpoints")
    own = {".toml": "config.toml", ".json": "environment.json", ".png": "loss.png"}
    for path in (
        run_folder / own.get(suffix, "metrics.jsonl"),
        run_folder / "checkpoints" / "best" / f"a{suffix}",
        tmp_path / "link" / f"a{suffix}",
    ):
        problem = refusal(ROWS[name], path, run_folder)
        assert f"'{path}' belongs to the run in '{run_folder}', which writes" in problem


@pytest.mark.parametrize("name", ROWS, ids=" --".join)
def test_the_folder_is_there_and_the_name_can_be_written(name, tmp_path, run_folder, monkeypatch):
    suffix = ROWS[name][2]
    missing = refusal(ROWS[name], tmp_path / "none" / f"a{suffix}", run_folder)
    assert missing.endswith("cannot be written: its folder does not exist; create it first")
    long = refusal(ROWS[name], tmp_path / ("x" * 300 + suffix), run_folder)
    assert "has a name of more than 255 bytes; choose a shorter one" in long
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    refused = refusal(ROWS[name], tmp_path / f"a{suffix}", run_folder)
    assert refused.endswith(f"cannot be written: no permission in '{tmp_path}'; name another file")


@pytest.mark.parametrize(("name", "beside"), [(("bench gpu", "out"), "a.md"), (("plan", "picture"), "a-timeline.png")])
def test_what_is_written_beside_is_checked_too(name, beside, tmp_path, run_folder):
    os.mkfifo(tmp_path / beside)
    problem = refusal(ROWS[name], tmp_path / f"a{ROWS[name][2]}", run_folder)
    assert f"{tmp_path / beside}' is a device, a FIFO" in problem


def test_every_option_that_writes_has_a_row():
    """By the help of the options, which says so."""
    found = set()
    for path in Path(jaxdist.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Extra" and len(node.args) > 2:
                option, _, told = (getattr(word, "value", None) for word in node.args[:3])
                if str(told).startswith(("Write", "Draw")):
                    found.add(option)
    assert found == {option for _, option in ROWS}


def test_it_is_refused_before_jax_is_imported(tmp_path, run_folder):
    """In one process, which a FIFO that is opened would stop."""
    os.mkfifo(tmp_path / "fifo")
    lines = []
    for name, (_, line, suffix) in ROWS.items():
        path = tmp_path / f"fifo{suffix}"
        if not path.exists():
            os.mkfifo(path)
        words = line.replace("FILE", str(path)).replace("RUN", str(run_folder)).split()
        module = name[0].split()[0]
        lines.append((f"jaxdist.{module}" + ".__main__" * (module in ("lab", "bench", "data")), words))
    program = """
import importlib, json, sys
from jaxdist.config import RequestError
for module, words in json.loads(sys.argv[1]):
    try:
        importlib.import_module(module).main(words)
    except RequestError:
        assert "jax" not in sys.modules, (module, words)
    else:
        sys.exit(f"{module} {words} was not refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(lines)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_file_of_an_earlier_call_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "schedules.png"
    path.write_text("old")
    assert lab(["schedules", f"--picture={path}"]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    before = path.read_bytes()

    def half(self, file, **_):
        Path(file).write_text("half")
        raise OSError("no space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", half)
    with pytest.raises(OSError, match="no space left"):
        lab(["schedules", f"--picture={path}"])
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
