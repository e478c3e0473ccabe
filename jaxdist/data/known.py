"""Keep what was found out by reading whole files, so that the next start reads samples of them alone.

Files are known again by their sizes, their times of modification and `SAMPLES` blocks of up to `SAMPLED` of them: a
start on a terabyte reads 3 MB. Where any of these differs, for instance in a copy, the files are read whole again, and
come to the same: what identifies data (`Source.digest`) is their whole content, as in every version. What changes with
the same time and size, outside of the samples, is found by `data.verify` alone.

The leader of a run tells the others what it knows (`told`, `hear`), which then read nothing of files that have the
same paths, sizes and times for them.

Nothing is kept of a file that was written less than `SETTLED` seconds before, which may have been written again within
a tick of the clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from jaxdist.files import WRONG_CONTENT, digest, write_whole
from jaxdist.files.caches import cache_folder
from jaxdist.files.json_files import LARGEST_LISTING, read_json
from jaxdist.files.reasons import reading

Found = TypeVar("Found")

FOLDER = "known"
"""The folder in the cache."""

SAMPLED = 256
"""Files of which blocks are read, at most; of more, every n-th."""

SAMPLES = 3
"""Blocks of each of them: at its beginning, in the middle and at its end."""

BLOCK = 4 << 10
"""Bytes of a block."""

SETTLED = 2.0
"""Seconds that a file must have been left alone."""

THREADS = 32
"""Files that are looked at in parallel: a network file system takes a millisecond for each."""

GROUP = 16
"""Files that a thread looks at, one after another."""

MANY = 64
"""Files from which on a start does not read the beginning of each."""

REMEMBERED = 64
"""Groups of files, and answers, that a process remembers: those that it needed last."""


class _State(NamedTuple):
    """How a file looks from outside."""

    size: int
    changed: int
    """When it was modified, in nanoseconds."""


_identities: OrderedDict[str, str] = OrderedDict()
"""The identities of files, by their paths and states."""

_answers: OrderedDict[str, Any] = OrderedDict()
"""Answers, by the names of the files in which they are kept."""


def known(question: str, files: Iterable[Path], find: Callable[[], Found]) -> Found:
    """Return what `find` returns, for JSON, or what it returned when it was last asked about these files.

    `question` names all that the answer depends on beside the content of the files. Raises `RequestError` if a file
    cannot be read, and what `find` raises.
    """
    files = tuple(files)
    states, place = _place(question, files)
    answer = _read(place)
    if answer is not None:
        _remember(_answers, place.name, answer["answer"])
        return answer["answer"]
    began = time.time()
    found = find()
    newest = max((state.changed for state in states), default=0)
    if began - newest / 1e9 > SETTLED and _states(files) == states:
        # What cannot be kept is found out again.
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, json.dumps({"answer": found, "seal": _seal(found)}))
        _remember(_answers, place.name, found)
    return found


def told() -> str:
    """Return what this process knows, for another one to `hear`."""
    return json.dumps({"identities": _identities, "answers": _answers})


def hear(text: str) -> None:
    """Know what another process has `told`, of files that have the same paths, sizes and times here."""
    heard = json.loads(text)
    for known_here, name in ((_identities, "identities"), (_answers, "answers")):
        for key, value in heard[name].items():
            _remember(known_here, key, value)


def known_before(question: str, files: Iterable[Path]) -> Any:
    """Return what is kept of these files, or None."""
    _, place = _place(question, tuple(files))
    answer = _read(place)
    return None if answer is None else answer["answer"]


def _place(question: str, files: tuple[Path, ...]) -> tuple[list[_State], Path]:
    """Return the states of the files, and where an answer about them is kept."""
    states = _states(files)
    return states, cache_folder() / FOLDER / f"{digest(question, _identity(files, states))}.json"


def _remember(what: OrderedDict[str, Any], key: str, value: Any) -> None:
    what[key] = value
    what.move_to_end(key)
    while len(what) > REMEMBERED:
        what.popitem(last=False)


def _read(place: Path) -> dict[str, Any] | None:
    if place.name in _answers:
        return {"answer": _answers[place.name]}
    try:
        found = read_json(place, LARGEST_LISTING, links=False)
        return found if found["seal"] == _seal(found["answer"]) else None
    except WRONG_CONTENT:
        return None


def _seal(answer: object) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(answer).encode())


def _identity(files: tuple[Path, ...], states: list[_State]) -> str:
    """Return a hash of the sizes and times of files, and of their samples."""
    seen = digest(*(str(path) for path in files), *(number for state in states for number in state))
    if seen not in _identities:
        total = xxhash.xxh3_128()
        count = min(len(files), SAMPLED)
        chosen = [number * len(files) // count for number in range(count)]
        for sample in _in_parallel(_sample, [files[number] for number in chosen]):
            total.update(sample)
        identity = digest(total.hexdigest(), *(number for state in states for number in state))
        _remember(_identities, seen, identity)
    return _identities[seen]


def _states(files: tuple[Path, ...]) -> list[_State]:
    return _in_parallel(_state, files)


def _state(path: Path) -> _State:
    with reading(path):
        state = os.stat(path)
    return _State(state.st_size, state.st_mtime_ns)


def _sample(path: Path) -> bytes:
    with reading(path), path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - BLOCK)
        places = sorted({last * part // (SAMPLES - 1) for part in range(SAMPLES)})
        return b"".join(os.pread(file.fileno(), BLOCK, place) for place in places)


def _in_parallel(look: Callable[[Path], Found], files: Sequence[Path]) -> list[Found]:
    if len(files) <= THREADS:
        return [look(path) for path in files]
    groups = [files[start : start + GROUP] for start in range(0, len(files), GROUP)]
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda group: [look(path) for path in group], groups)
        return [one for group in found for one in group]
