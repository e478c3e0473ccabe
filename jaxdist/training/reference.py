"""The log-probabilities of pairs of answers under the weights that a run begins with, computed once and kept.

They are in the cache of the data, in a folder that the weights, the precision, and the rows name: a run that is resumed
or started again reads them. Any mesh may have computed them: they are the same up to rounding.
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from jaxtyping import Float

from jaxdist.cluster.consensus import from_all, leader, told_by_leader
from jaxdist.config import RequestError
from jaxdist.data.rows import TokenRows
from jaxdist.data.token_cache import Damaged, check, open_cache
from jaxdist.files import digest, write_whole
from jaxdist.files.caches import cache_folder
from jaxdist.training.scoring import of_rows
from jaxdist.training.task_text import PreferenceTask, Reference
from jaxdist.weights.source import Stored, source_of

if TYPE_CHECKING:
    from jaxdist.models import Params
    from jaxdist.training.run import Run

RECORD = "reference.txt"
"""The file of a run folder that names the weights of its reference."""

VERSION = 1
"""Version of what is kept; increase it when the same weights and rows would have other log-probabilities."""


def refer(
    run: Run,
    begun: Callable[[], Params],
    say: Callable[[str], None] = lambda line: None,
    note: Callable[[], None] = lambda: None,
    begins: bool = False,
) -> None:
    """Give the task of `run` what its loss refers to, where that is kept; call under `jax.set_mesh`.

    `begun` returns the weights before the first step, if they are needed. All processes call this; `note` is called
    while it computes, as a sign of life. A run that `begins` writes down of which weights its reference is; one that
    goes on refers to the same. Raises `RequestError` where they are needed, and are not what they were.
    """
    task = run.task
    if not isinstance(task, PreferenceTask) or not task.keeps_reference or task.reference is not None:
        return
    recorded = None if begins else _recorded(run)
    weights = recorded or _weights_of(run)
    folder = cache_folder() / _key(run, task, weights)
    parts = {"train": task.data.train, "validation": task.data.validation}
    found = _kept(folder, parts)
    # All have the same, which is the leader's, or they compute it together: copies of a row must not differ.
    of_leader, *others = from_all("" if found is None else _checksum(found))
    if of_leader and any(other != of_leader for other in others):
        found = _told(folder.name, found or {}, parts)
    elif not of_leader:
        found = None
    if found is None:
        if recorded and recorded != _weights_of(run):
            raise RequestError(
                f"the weights that this run began with (init_from {run.config.init_from}) are not what they were, and "
                f"the cache has lost the log-probabilities under them; put them back, or begin another run from them"
            )
        say("reference   computing the log-probabilities of all answers under the weights at the start, once")
        params = begun()
        found = {name: _of(run, params, rows, note) for name, rows in parts.items()}
        if leader():
            open_cache(folder, partial(_write, found))
    if begins and leader():
        write_whole(run.config.folder / RECORD, weights)
    task.reference = found


def _weights_of(run: Run) -> str:
    """Return what names the weights that a run begins with, if it begins now."""
    source = source_of(run.config.init_from)
    # New weights follow from the model and the seed.
    return source.lasting()[1] if isinstance(source, Stored) else f"new {run.config.train.seed}"


def _recorded(run: Run) -> str | None:
    """Return what a run has written down of the weights that it began with; None where it has not come so far.

    All processes call this, and have what the leader finds: a shared file system may show it a new file first.
    """
    found = None
    with contextlib.suppress(FileNotFoundError):
        found = (run.config.folder / RECORD).read_text()
    return from_all(found)[0]


def _key(run: Run, task: PreferenceTask, weights: str) -> str:
    """Return what names the log-probabilities: the weights, how they compute, and the rows."""
    config = run.config
    model: dict[str, Any] = config.model.model_dump(mode="json", exclude={"remat"})
    named = [f"{name} {value}" for name, value in sorted(model.items())]
    return digest("reference", VERSION, weights, config.precision, task.fingerprint, *named)


def _kept(folder: Path, parts: dict[str, TokenRows]) -> Reference | None:
    """Return what is in the cache; None where it is not there, or not as it was written."""
    if not os.path.lexists(folder):
        return None
    try:
        check(folder)
        found = {name: np.fromfile(folder / name, np.float32) for name in parts}
    except (Damaged, OSError):
        return None
    return found if all(found[name].size == rows.count for name, rows in parts.items()) else None


def _write(found: Reference, folder: Path) -> dict[str, Any]:
    for name, values in found.items():
        values.astype(np.float32).tofile(folder / name)
    return {name: values.size for name, values in found.items()}


def _told(name: str, found: Reference, parts: dict[str, TokenRows]) -> Reference:
    """Return what the leader has `found`, in all processes: on hosts with caches of their own, others lack it."""
    values = b"".join(found[part].tobytes() for part in parts) if leader() else b""
    told = base64.b64decode(told_by_leader(f"reference/{name}", base64.b64encode(values).decode()))
    train, validation = (rows.count for rows in parts.values())
    values_of_all = np.frombuffer(told, np.float32)
    assert values_of_all.size == train + validation
    return dict(zip(parts, np.split(values_of_all, [train]), strict=True))


def _checksum(found: Reference) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(values.tobytes() for values in found.values()))


def _of(run: Run, params: Params, rows: TokenRows, note: Callable[[], None]) -> Float[np.ndarray, " rows"]:
    return of_rows(run, params, rows.count, rows.sequence, rows.read, note, rows.apart).astype(np.float32)
