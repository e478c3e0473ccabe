"""A folder of saved steps, and whether they are whole: a checksum of every file stands beside them. No jax here.

    STEP/            written by Orbax under another name first, then renamed: it is there whole or not at all
    sums/STEP.json   size and XXH3 of its files, written after that; a step without it counts as not saved

Orbax hands out flipped bytes without a word. XXH3 of 64 bits reads a file as fast as it comes from the memory.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

TORN = ".orbax-checkpoint-tmp"
"""How the name of a folder ends while Orbax writes it."""

BLOCK = 1 << 19
"""Bytes that are read at a time: few enough to be in a cache when their checksum is made."""

READERS = 4
"""Files that are read at a time."""


@dataclass(frozen=True)
class Shelf:
    """`folder` need not exist. What a method raises is `OSError`, unless it says otherwise."""

    folder: Path

    def path(self, step: int) -> Path:
        return self.folder / str(step)

    def steps(self) -> list[int]:
        """All that are there under their name, in order."""
        found = self.folder.iterdir() if self.folder.is_dir() else ()
        return sorted(int(path.name) for path in found if path.name.isdigit())

    def sealed(self) -> list[int]:
        """Those that have checksums: the ones that were saved."""
        return [step for step in self.steps() if self._sums(step).exists()]

    def seal(self, step: int) -> None:
        """Write the checksums of a step that is there whole. Reads all of it."""
        sums = self._sums(step)
        sums.parent.mkdir(exist_ok=True)
        temporary = sums.with_suffix(".tmp")
        temporary.write_text(json.dumps({"xxh3_64": _checksums(self.path(step))}))
        temporary.replace(sums)

    def damage(self, step: int, thorough: bool = True) -> str | None:
        """What is wrong with a step, such as `params/_METADATA is missing`; None if nothing is.

        Reads all of it; when not `thorough`, compares the sizes of its files alone.
        """
        if not self._sums(step).exists():
            return "it has no checksums, because its save was not completed"
        try:
            expected = {name: (size, digest) for name, (size, digest) in self._read_sums(step).items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return f"its checksums in {self._sums(step).relative_to(self.folder)} cannot be read"
        path = self.path(step)
        for name, (size, _) in expected.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if (there := (path / name).stat().st_size) != size:
                return f"{name} has {there} bytes, not {size}"
        if not thorough:
            return None
        try:
            found = _checksums(path)
        except OSError as error:
            return f"{error.filename} cannot be read ({error.strerror})"
        return next((f"{name} differs from its checksum" for name in expected if found[name] != expected[name]), None)

    def facts(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays. Raises `ValueError` where that is no JSON."""
        return json.loads((self.path(step) / "facts" / "metadata").read_text("utf-8"))

    def size(self, step: int) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.path(step).rglob("*") if path.is_file())

    def unseal(self, step: int) -> None:
        """From now on the step, if there is one, was not saved."""
        self._sums(step).unlink(missing_ok=True)

    def remove(self, step: int) -> None:
        """The checksums go first: a step that is half removed was not saved."""
        self.unseal(step)
        shutil.rmtree(self.path(step))

    def move(self, step: int, other: Shelf) -> None:
        """To another shelf of the same disk, in place of what it has of that step."""
        if step in other.steps():
            other.remove(step)
        other.folder.mkdir(parents=True, exist_ok=True)
        other._sums(step).parent.mkdir(exist_ok=True)
        self.path(step).rename(other.path(step))
        if self._sums(step).exists():
            self._sums(step).replace(other._sums(step))

    def keep(self, newest: int, every: int = 0) -> list[int]:
        """Remove all but the `newest` so many that are sealed and those that `every` divides (0: none); which.

        What is not sealed and newer than all that are stays: it may be on its way.
        """
        sealed = self.sealed()
        if not sealed:
            return []
        kept = {*sealed[-newest:], *(step for step in sealed if every and step % every == 0)}
        removed = [step for step in self.steps() if step < sealed[-1] and step not in kept]
        for step in removed:
            self.remove(step)
        return removed

    def clear(self) -> list[int]:
        """Remove what a process left that died while it saved; the steps of those that were almost done."""
        for torn in self.folder.glob(f"*{TORN}*"):
            shutil.rmtree(torn, ignore_errors=True)
        unsealed = [step for step in self.steps() if not self._sums(step).exists()]
        for step in unsealed:
            self.remove(step)
        return unsealed

    def _sums(self, step: int) -> Path:
        return self.folder / "sums" / f"{step}.json"

    def _read_sums(self, step: int) -> dict[str, list[Any]]:
        return json.loads(self._sums(step).read_text("utf-8"))["xxh3_64"]


def _checksums(folder: Path) -> dict[str, tuple[int, str]]:
    """(size, XXH3 in hexadecimal) of every file under `folder`, by its path there."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(READERS) as pool:  # xxhash and read leave Python's lock to the others
        return dict(zip((str(path.relative_to(folder)) for path in paths), pool.map(_checksum, paths), strict=True))


def _checksum(path: Path) -> tuple[int, str]:
    size, digest = 0, xxhash.xxh3_64()
    buffer = memoryview(bytearray(min(BLOCK, path.stat().st_size + 1)))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            size += count
            digest.update(buffer[:count])
    return size, digest.hexdigest()
