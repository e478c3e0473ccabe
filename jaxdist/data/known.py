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
from functools import partial
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

REMEMBERED = 1 << 24
"""Characters, as JSON, of what a process remembers of files: what it needed last. A mixture may have 1,500 sources."""


class _State(NamedTuple):
    """How a file looks from outside."""

    size: int
    changed: int
    """When it was modified, in nanoseconds."""


class _Memory(OrderedDict[str, Any]):
    """What was needed last, by name, in at most `REMEMBERED` characters."""

    length = 0

    def clear(self) -> None:
        """Forget everything."""
        super().clear()
        self.length = 0

    def keep(self, key: str, value: Any) -> None:
        """Remember a value, and forget the oldest ones where that is too much."""
        self.length += _length(value) - (_length(self[key]) if key in self else 0)
        self[key] = value
        self.move_to_end(key)
        while self.length > REMEMBERED and len(self) > 1:
            _, oldest = self.popitem(last=False)
            self.length -= _length(oldest)


def _length(value: Any) -> int:
    return len(json.dumps(value))


_identities = _Memory()
"""Hashes of the samples of files, by their paths and states."""

_answers = _Memory()
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
        _answers.keep(place.name, answer["answer"])
        return answer["answer"]
    began = time.time()
    found = find()
    newest = max((state.changed for state in states), default=0)
    if began - newest / 1e9 > SETTLED and _states(files) == states:
        # What cannot be kept is found out again.
        with contextlib.suppress(OSError):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_whole(place, json.dumps({"answer": found, "seal": _seal(found)}))
        _answers.keep(place.name, found)
    return found


def sampled(files: Iterable[Path], samples: int = SAMPLES) -> str:
    """Return a hash of the sizes and samples of files, wherever they lie. If it differs, so does their content.

    `samples` is the number of blocks that are read of a file, at least 2.
    """
    files = tuple(files)
    states = _states(files)
    return digest(_samples(files, states, samples), *(state.size for state in states))


def told() -> str:
    """Return what this process knows, for another one to `hear`."""
    return json.dumps({"identities": _identities, "answers": _answers})


def hear(text: str) -> None:
    """Know what another process has `told`, of files that have the same paths, sizes and times here."""
    heard = json.loads(text)
    for known_here, name in ((_identities, "identities"), (_answers, "answers")):
        for key, value in heard[name].items():
            known_here.keep(key, value)


def known_before(question: str, files: Iterable[Path]) -> Any:
    """Return what is kept of these files, or None."""
    _, place = _place(question, tuple(files))
    answer = _read(place)
    return None if answer is None else answer["answer"]


def _place(question: str, files: tuple[Path, ...]) -> tuple[list[_State], Path]:
    """Return the states of the files, and where an answer about them is kept."""
    states = _states(files)
    return states, cache_folder() / FOLDER / f"{digest(question, _identity(files, states))}.json"


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
    return digest(_samples(files, states), *(number for state in states for number in state))


def _samples(files: tuple[Path, ...], states: list[_State], samples: int = SAMPLES) -> str:
    """Return a hash of the samples of files, which are read once while the files look as they do."""
    more = [] if samples == SAMPLES else [samples]
    seen = digest(*(str(path) for path in files), *(number for state in states for number in state), *more)
    if seen not in _identities:
        total = xxhash.xxh3_128()
        count = min(len(files), SAMPLED)
        chosen = [number * len(files) // count for number in range(count)]
        for sample in in_parallel(partial(_sample, samples), [files[number] for number in chosen]):
            total.update(sample)
        _identities.keep(seen, total.hexdigest())
    return _identities[seen]


def _states(files: tuple[Path, ...]) -> list[_State]:
    return in_parallel(_state, files)


def _state(path: Path) -> _State:
    with reading(path):
        state = os.stat(path)
    return _State(state.st_size, state.st_mtime_ns)


def _sample(samples: int, path: Path) -> bytes:
    with reading(path), path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - BLOCK)
        places = sorted({last * part // (samples - 1) for part in range(samples)})
        return b"".join(os.pread(file.fileno(), BLOCK, place) for place in places)


def in_parallel(look: Callable[[Path], Found], files: Sequence[Path]) -> list[Found]:
    """Return what `look` returns of each file. Raises what it raises."""
    if len(files) <= THREADS:
        return [look(path) for path in files]
    groups = [files[start : start + GROUP] for start in range(0, len(files), GROUP)]
    with ThreadPoolExecutor(THREADS) as pool:
        found = pool.map(lambda group: [look(path) for path in group], groups)
        return [one for group in found for one in group]
