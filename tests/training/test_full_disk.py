"""A disk that takes no more of a run: one sentence, exit code 1, and nothing lost that was saved before.

The table has a row for every file that a run leaves in its folder, and for the folder of its checkpoints, which a real
disk of few bytes shows: TensorStore writes there, below Python.
"""

import builtins
import errno
import gc
import inspect
import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from orbax.checkpoint._src.serialization import serialization

from jaxdist import train
from jaxdist.process.exit_codes import DONE, FAILED, REFUSED
from jaxdist.request import outcome
from jaxdist.training.checkpoint.orbax_writer import NOT_WRITTEN
from tests.tiers import exhaustive, thinned
from tests.training.conftest import SMALL, over

TINY = over(
    SMALL,
    *("--model.layers=1", "--train.steps=6", "--checkpoint.every=2", "--validation.every=3", "--validation.batches=1"),
    *("--log.tensorboard=true", "--optimizer.schedule=constant"),
)

REFUSED_AT_ONCE = "is refused when the run enters its folder"
ENDS = "ends with one sentence"
GOES_ON = "goes on"
REAL = "needs a real disk"

PLACES = {
    ".lock": REFUSED_AT_ONCE,
    "run.json": REFUSED_AT_ONCE,
    "config.toml": ENDS,
    "environment.json": ENDS,
    "tokenizer.json": ENDS,
    "metrics.jsonl": ENDS,
    "loss.png": ENDS,
    "heartbeats": GOES_ON,  # others take the run for silent
    "log.txt": GOES_ON,  # the terminal has the lines too
    "tensorboard": GOES_ON,  # with a warning
    "checkpoints": REAL,
}
"""What a run writes into its folder, and what it does where that cannot be written."""


@pytest.fixture
def argv(text, tmp_path):
    return over(TINY, f"--data.path={text}", f"--run-dir={tmp_path / 'run'}")


@pytest.fixture
def full(tmp_path, monkeypatch):
    """Let nothing be written any more to the files of a name in the folder of the run, or below a folder of it."""

    def call(name: str, number: int) -> None:
        folder = tmp_path / "run"

        def check(path, writes: bool) -> None:
            if not writes or not isinstance(path, str | os.PathLike):
                return
            path = Path(path)
            # A new file is written beside its name: `.NAME.HEX.tmp`.
            first = path.relative_to(folder).parts[0] if path.is_relative_to(folder) and path != folder else ""
            if first == name or first.startswith(f".{name}."):
                raise OSError(number, os.strerror(number), str(path))

        def opening(original):
            def opened(path, mode="r", *arguments, **options):
                check(path, writes=set(mode) & set("wax+") != set())
                return original(path, mode, *arguments, **options)

            return opened

        system = os.open

        def os_open(path, flags, *arguments, **options):
            check(path, writes=bool(flags & (os.O_WRONLY | os.O_RDWR)))
            return system(path, flags, *arguments, **options)

        monkeypatch.setattr(builtins, "open", opening(builtins.open))
        monkeypatch.setattr(io, "open", opening(io.open))
        monkeypatch.setattr(os, "open", os_open)

    return call


@pytest.mark.parametrize(
    ("name", "number"),
    thinned(
        [("metrics.jsonl", errno.EIO), ("config.toml", errno.EROFS)]
        + [(name, errno.ENOSPC) for name, does in PLACES.items() if does != REAL],
        4,
    ),
)
def test_a_file_that_cannot_be_written(name, number, argv, full, capsys):
    full(name, number)
    code = outcome(train.main, argv)
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if PLACES[name] == GOES_ON:
        assert code == DONE, said
        assert said.splitlines()[-1].startswith("next ")
        return
    assert code == (REFUSED if PLACES[name] == REFUSED_AT_ONCE else FAILED), said
    sentences = [line for line in said.splitlines() if "cannot be written" in line]
    assert len(sentences) == 1, said
    assert os.strerror(number).lower() in sentences[0].lower()
    if code == FAILED:
        assert "stopped: " in sentences[0]
        assert name in sentences[0]


def test_every_file_of_a_run_has_a_row(straight):
    folder = straight("--log.tensorboard=true", "--train.steps=2")
    assert {path.name for path in folder.iterdir()} <= set(PLACES)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
@pytest.mark.slow
@pytest.mark.parametrize("size", [560, *exhaustive([(480,), (2000,)])])
def test_a_disk_of_few_kilobytes(size, text, tmp_path):
    """Its end comes within the first step that is saved, within the best one, and within a later one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        options = over(
            TINY, f"--data.path={text}", f"--run-dir={disk / 'run'}", "--model.vocab=2048", "--train.steps=12"
        )
        command = [sys.executable, "-m", "jaxdist.train", "--mesh=1x1x1", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    said = done.stderr
    assert done.returncode == FAILED, said
    assert "Traceback" not in said
    assert "Exception ignored" not in said
    assert "never awaited" not in said
    stopped = [line for line in said.splitlines() if line.startswith("stopped: ")]
    assert len(stopped) == 1, said
    # On a busy machine a step may be whole before the disk is full.
    assert re.search("(could not be saved|a later operation failed): no space left on device; ", stopped[0])


def test_what_orbax_leaves_unwritten_is_silent_wherever_it_is_freed():
    """On a busy machine that is before the writer is closed; other forgotten coroutines still complain."""

    async def write_fragment(): ...

    async def other(): ...

    assert "async def write_fragment(" in inspect.getsource(serialization)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", NOT_WRITTEN, RuntimeWarning)
        for coroutine in (write_fragment, other):
            coroutine()
            gc.collect()
    # Not those that another test has left.
    own = [str(one.message) for one in said if "wherever_it_is_freed" in str(one.message)]
    assert len(own) == 1
    assert ".other'" in own[0]
