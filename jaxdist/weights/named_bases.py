"""Find the weights that runs name as their base: nothing may be written in their place. No jax here.

A run names them by `init_from` in its config.toml, in `huggingface/source.json`, and by the facts of its checkpoints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.files import WRONG_CONTENT, read_toml
from jaxdist.files.json_files import read_json
from jaxdist.huggingface.folder import KEPT
from jaxdist.huggingface.schema import SOURCE
from jaxdist.request.pretrained import RUNS
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.run_dir import STEP_DIRS

Identity = tuple[int, int]
"""Device and number of a file or a folder, whatever the name by which it is reached."""


def check_not_needed(run: Path, target: Path) -> None:
    """Raise `RequestError` where `target` is, or lies in, what a run has begun with, or holds the folder `run`.

    The runs are that one, and those beside it, beside the target and in the folder of runs of the working directory.
    """
    own = _identity(target)
    if own is not None and own in {_identity(folder) for folder in (run.resolve(), *run.resolve().parents)}:
        raise RequestError(f"--export '{target}' holds the run '{run}' itself; name another")
    written = {own, None if target.is_dir() else _identity(target.parent)} - {None}
    for other in _runs(run, target):
        for base in bases(other):
            if written & _identities(base):
                raise RequestError(
                    f"--export '{target}' would change '{base}', which the run '{other}' names as the weights that it "
                    f"began with; name another"
                )


def bases(run: Path) -> Iterator[Path]:
    """Yield the folders that a run names as what it began with, or trains beside."""
    with suppress(*WRONG_CONTENT):
        yield Path(os.path.abspath(read_toml(run / "config.toml")["init_from"]))
    with suppress(*WRONG_CONTENT):
        yield Path(read_json(run / KEPT / SOURCE, links=False)["path"])
    for name in STEP_DIRS:
        steps = StepDir(run / name)
        for step in steps.steps():
            with suppress(*WRONG_CONTENT):
                yield Path(steps.facts(step)["base"]["path"])


def _runs(run: Path, target: Path) -> Iterator[Path]:
    """Yield the run, and others that may know the target."""
    yield run
    for folder in {run.resolve().parent, target.parent.resolve(), RUNS.resolve()}:
        with suppress(OSError):
            yield from sorted(
                Path(entry) for entry in os.scandir(folder) if os.path.isfile(f"{entry.path}/config.toml")
            )


def _identities(base: Path) -> set[Identity | None]:
    """Return the folder itself and, where its files are links, those in which these lie."""
    found = {_identity(base)}
    with suppress(OSError, ValueError):
        found |= {_identity((base / name).resolve().parent) for name in os.listdir(base)}
    return found


def _identity(path: Path) -> Identity | None:
    """Return what `path` leads to; None where there is nothing."""
    try:
        status = path.stat()
    except (OSError, ValueError):
        # No path has a NUL in it, but somebody else's file may.
        return None
    return status.st_dev, status.st_ino
