"""Share the pieces of a text among the processes of a run: on hosts that see the same cache, each writes some of them.

The leader of a run fills the folder, and names the run in its plan. The others, which wait for it, look for such a
folder (`help_to_tokenize`), and write pieces there. Who writes a piece claims it first, by a file that can be made only
once, and the cores of its host likewise. What a helper has claimed and not written in time, because it was killed or
does not see the text, the leader writes itself. Two that write the same piece write the same bytes. Hosts with caches
of their own find no such folder, and tokenize by themselves when their turn comes.
"""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path

from jaxdist.config import RequestError
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.token_cache import FOLDER_NAME
from jaxdist.data.tokenizing.encoder import PIECES, TOKENIZER, is_written
from jaxdist.data.tokenizing.pieces import PLAN, Plan
from jaxdist.data.tokenizing.workers import core_count, write_pieces
from jaxdist.files import WRONG_CONTENT, digest
from jaxdist.files.caches import cache_folder
from jaxdist.files.json_files import LARGEST_LISTING, read_text
from jaxdist.huggingface.given_tokenizer import load_tokenizer

LOOK_SECONDS = 1.0
"""Seconds between two looks at the cache. A network file system may show new files half a minute late."""

PATIENCE = 120.0
"""Seconds without a piece that is written after which the leader writes what others have claimed."""

CLAIM = ".claim"
"""What the names of claims end with."""

_run: ContextVar[str] = ContextVar("run", default="")


@contextlib.contextmanager
def shared_by(run: str) -> Iterator[None]:
    """Let the processes of a run of this name help with what is tokenized inside."""
    token = _run.set(run)
    try:
        yield
    finally:
        _run.reset(token)


def run_that_shares() -> str:
    """Return the name of the run whose processes may help; empty if there are no others."""
    return _run.get()


def claimed(folder: Path, pieces: Iterable[int]) -> Iterator[int]:
    """Yield those of the pieces that nobody else has claimed, each claimed when it is asked for. Raises `OSError`."""
    for piece in pieces:
        with contextlib.suppress(FileExistsError):
            _claim(folder, f"{piece:06}")
            yield piece


def claim_cores(folder: Path) -> bool:
    """Claim the cores of this process; return whether no process of its host that shares them has. Raises `OSError`.

    Processes of one host may have the same cores, or cores of their own, as Slurm gives them.
    """
    with contextlib.suppress(FileExistsError):
        _claim(folder, _cores())
        return True
    return False


def forget_claims(folder: Path) -> None:
    """Remove the claims of processes that were killed. Raises `OSError`."""
    for path in (folder / PIECES).glob(f"*{CLAIM}"):
        path.unlink()


def _claim(folder: Path, name: str) -> None:
    """Raise `FileExistsError` if anything of that name is claimed, and other `OSError`s."""
    os.close(os.open(folder / PIECES / f"{name}{CLAIM}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))


def _cores() -> str:
    """Return a name for the cores that this process may use."""
    numbers = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    return digest(platform.node(), *numbers)[:16]


def wait_for_others(
    folder: Path, plan: Plan, pieces: Iterable[int], reading: Pass, after_each: Callable[[], object]
) -> list[int]:
    """Wait while others write these pieces, and return those that they do not write in time.

    `reading` hears of the bytes of each, and `after_each` is called after it.
    """
    missing = list(pieces)
    last = time.monotonic()
    while missing and time.monotonic() - last < PATIENCE:
        written = [piece for piece in missing if is_written(folder, piece)]
        for piece in written:
            missing.remove(piece)
            reading.read(plan.bytes_of(piece))
            after_each()
            last = time.monotonic()
        if missing and not written:
            reading.read(0)
            time.sleep(LOOK_SECONDS)
    return missing


def help_to_tokenize(run: str, ended: Callable[[], bool], progress: Progress) -> None:
    """Write pieces of whatever a process of `run` tokenizes in the same cache, until it has `ended`.

    Raises nothing for what is wrong with the text, or the disk: the leader, which needs all pieces, says it.
    """
    seen: set[Path] = set()
    while not ended():
        folder, plan = _folder_of(run)
        if plan is not None and folder not in seen:
            seen.add(folder)
            with contextlib.suppress(RequestError, OSError):
                _help(folder, plan, progress)
        time.sleep(LOOK_SECONDS)


def _help(folder: Path, plan: Plan, progress: Progress) -> None:
    if not claim_cores(folder):
        return
    tokenizer = load_tokenizer(read_text(folder / TOKENIZER, LARGEST_LISTING, links=False))
    missing = [piece for piece in range(len(plan.pieces)) if not is_written(folder, piece)]
    helping = Pass(progress, "tokenizing", sum(plan.bytes_of(piece) for piece in missing))
    # From the end: the leader begins at the other one, and puts its pieces into shards in their order.
    pieces = claimed(folder, reversed(missing))
    write_pieces(folder, plan, tokenizer, pieces, helping, lambda: None, min(core_count(), len(missing)))


def _folder_of(run: str) -> tuple[Path, Plan | None]:
    """Return the folder that a process of a run fills, with its plan; None if there is none."""
    cache = cache_folder()
    with contextlib.suppress(OSError):
        for folder in cache.iterdir():
            if "." not in folder.name or not FOLDER_NAME.fullmatch(folder.name) or not (folder / PLAN).is_file():
                continue
            with contextlib.suppress(*WRONG_CONTENT):
                plan = Plan.read(folder)
                if plan.run == run:
                    return folder, plan
    return cache, None
