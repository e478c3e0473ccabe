"""A folder of saved steps, and whether they are complete: beside each stands a seal with a checksum of every file.

    STEP/            written by Orbax under another name first, then renamed: committed completely or not at all
    sums/STEP.json   the seal: the run's id, the step, and size and XXH3 of every file, written after that

Orbax restores flipped bytes silently. XXH3 of 64 bits reads a file as fast as it comes from memory.

A committed step is never removed because its seal is missing: a copy of the folder that was cut off lacks the seals,
not the steps. Whether such a step can be used is found by reading it (`training.checkpoint.readback`). This module
does not import jax.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdist.files import WRONG_CONTENT, Checksum, checksums, write_whole
from jaxdist.files.json_files import LARGEST_LISTING, read_json
from jaxdist.files.json_schema import (
    COUNT,
    NULL,
    NUMBER,
    PATH,
    TEXT,
    WORD,
    Rule,
    Rules,
    is_number,
    list_of,
    object_of,
    wrong_values,
)

TORN = ".orbax-checkpoint-tmp"
"""Part of a folder's name while Orbax writes it."""

STEP = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
"""The name of a step; a folder with any other name is not a step."""

UNSEALED = "it has no checksums"
UNREADABLE_SEAL = "its checksums cannot be read"
"""Damage of the seal alone, as `UNSEALED`: the step itself may be complete."""

TIME = Rule("seconds since 1970", lambda value: is_number(value) and 0 <= value < 2**40)
BASELINE = object_of("an object with nats, name and unit", {"nats": NUMBER, "name": WORD, "unit": WORD})
RAISED_FACT = object_of(
    "an object with the losses that are usual, and since which step one is raised",
    {"usual": list_of(NUMBER, "a list of numbers"), "since": COUNT | NULL},
)
BASE_FACT = object_of("an object with a path and a digest", {"path": PATH, "digest": WORD})

RUN_FACTS: Rules = {"steps": COUNT, "data": TEXT, "best": NUMBER | NULL, "baseline": BASELINE | NULL}
"""The facts that a run relies on when it resumes, beside the `step`, which every saved step has."""

OTHER_FACTS: Rules = {
    "seed": COUNT,
    "late": COUNT,
    "mesh": WORD,
    "processes": COUNT,
    "time": TIME,
    "base": BASE_FACT,
    "raised_loss": RAISED_FACT,
}
"""The other facts, which older versions may not have written."""


def _are_checksums(value: Any) -> bool:
    """Return whether a value is an object, not empty, of sizes and digests by paths."""
    if not isinstance(value, dict) or not value or not all(map(PATH.holds, value)):
        return False
    return all(
        isinstance(entry, list) and len(entry) == 2 and COUNT.holds(entry[0]) and WORD.holds(entry[1])
        for entry in value.values()
    )


SEAL: Rules = {
    "step": COUNT | NULL,
    "run": WORD | NULL,
    "xxh3_64": Rule("an object of sizes and digests by paths", _are_checksums),
}
"""What a seal holds."""

FACTS: Rules = {"step": COUNT, **RUN_FACTS, **OTHER_FACTS}


@dataclass(frozen=True)
class Seal:
    """What was known about a step when its checksums were made."""

    files: Mapping[str, Checksum]
    """By path within the step's folder."""
    step: int | None
    """None in seals of the first format, which had only checksums."""
    run: str | None
    """The id of the run; None in seals of the first format, and where the run has none."""
    finite: bool
    """Whether every number of the step was checked to be finite."""


@dataclass(frozen=True)
class StepDir:
    """A folder of steps, which need not exist. Methods raise `OSError`, unless they say otherwise."""

    folder: Path
    run: str | None = None
    """The id of the run that the steps must belong to; None accepts any."""

    def path(self, step: int) -> Path:
        """Return the folder of one step."""
        return self.folder / str(step)

    def steps(self) -> list[int]:
        """Return all steps that Orbax has committed, in order.

        A symbolic link does not count: nothing is read, or removed, through it.
        """
        if not self.folder.is_dir():
            return []
        with os.scandir(self.folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        return sorted(int(name) for name in names if STEP.fullmatch(name))

    def sealed(self) -> list[int]:
        """Return the steps that have a seal, in order."""
        return [step for step in self.steps() if self.seal_of(step) is not None]

    def seals(self) -> list[int]:
        """Return the steps whose seal is there, in order, also of steps that are gone."""
        if not self._sums(0).parent.is_dir():
            return []
        names = [path.name.removesuffix(".json") for path in self._sums(0).parent.glob("*.json")]
        return sorted(int(name) for name in names if STEP.fullmatch(name))

    def last_step(self, asked: int = 0, thorough: bool = True) -> int | None:
        """Return the last step of a finished run, if it is saved and complete; None for a run that is not finished.

        The run is to have at least `asked` steps. `thorough` is as in `damage`.
        """
        step = max(self.sealed(), default=None)
        try:
            if not step or self.missing_run_facts(step):
                return None
            # Most runs are not finished, and what they resume from is read later.
            if step < max(self.facts(step)["steps"], asked) or self.damage(step, thorough):
                return None
        except WRONG_CONTENT:
            # The step was removed, or changed, meanwhile.
            return None
        return step

    def seal(self, step: int, sums: Mapping[str, Checksum] | None = None) -> None:
        """Write the checksums of a step that is complete, and whose numbers are all finite.

        Reads all of it, unless its `sums` are given.
        """
        sums = sums or self.checksums(step)
        seal = self._sums(step)
        seal.parent.mkdir(exist_ok=True)
        content = {"run": self.run, "step": step, "finite": True, "xxh3_64": dict(sorted(sums.items()))}
        write_whole(seal, json.dumps(content))

    def checksums(self, step: int) -> dict[str, Checksum]:
        """Return the checksum of every file of a step, by its path there. Reads all of it."""
        path = self.path(step)
        return checksums_in(path, [str(file.relative_to(path)) for file, _ in files_in(path)])

    def seal_of(self, step: int) -> Seal | None:
        """Return the seal of a step; None where there is none that can be understood."""
        try:
            content = read_json(self._sums(step), LARGEST_LISTING, links=False)
        except WRONG_CONTENT:
            return None
        # Anybody may have written this file.
        if "xxh3_64" not in content or any(wrong_values(SEAL, content)):
            return None
        files = {name: (size, digest) for name, (size, digest) in content["xxh3_64"].items()}
        return Seal(files, content.get("step"), content.get("run"), content.get("finite") is True)

    def damage(self, step: int, thorough: bool = True, compare: Compare | None = None) -> str | None:
        """Return what is wrong with a step, such as `params/_METADATA is missing`; None if nothing is.

        Reads all of it, or lets `compare` do that; when not `thorough`, compares only names and sizes of its files.
        """
        seal = self.seal_of(step)
        if seal is None:
            return UNSEALED if not self._sums(step).exists() else UNREADABLE_SEAL
        if seal.step not in (None, step):
            return f"its checksums belong to step {seal.step}"
        if None not in (seal.run, self.run) and seal.run != self.run:
            return f"it belongs to another run ({seal.run}; this one is {self.run})"
        try:
            damage = self._wrong_sizes(step, seal)
        except OSError as error:
            return unreadable_file(error)
        # Names and sizes cost no reading; checksums need all of it.
        if damage is None and thorough:
            damage = compare(self, step, seal.files) if compare else differing(self.path(step), seal.files)
        return damage or self.wrong_facts(step)

    def _wrong_sizes(self, step: int, seal: Seal) -> str | None:
        """Return which file is missing, unknown, or of another size than the seal says."""
        path = self.path(step)
        sizes = {str(file.relative_to(path)): size for file, size in files_in(path)}
        for name, (size, _) in seal.files.items():
            if name not in sizes:
                return f"{name} is missing"
            if sizes[name] is None:
                return f"{name} is not a regular file"
            if sizes[name] != size:
                return f"{name} has {sizes[name]} bytes, not {size}"
        unknown = sorted(sizes.keys() - seal.files.keys())
        if unknown:
            return f"{unknown[0]} is not among its checksums"
        return None

    def wrong_facts(self, step: int) -> str | None:
        """Return what is wrong with the facts: a type, or the number of the step where another was copied here."""
        try:
            facts = self.facts(step)
        except WRONG_CONTENT:
            return "facts/metadata cannot be read"
        if "step" not in facts:
            return "facts/metadata has no step"
        problem = next(wrong_values(FACTS, facts), None)
        if problem:
            return f"facts/metadata: {problem}"
        if facts["step"] != step:
            return f"it is a copy of step {facts['step']}"
        return None

    def facts(self, step: int) -> dict[str, Any]:
        """Return what was saved beside the arrays. Raises one of `WRONG_CONTENT`."""
        return read_json(self.path(step) / "facts" / "metadata", links=False)

    def missing_run_facts(self, step: int) -> list[str]:
        """Return which facts a step lacks because `train` did not write it. Raises one of `WRONG_CONTENT`."""
        return sorted(RUN_FACTS.keys() - self.facts(step).keys())

    def size(self, step: int) -> int:
        """Return the bytes of a step on disk."""
        return sum(size or 0 for _, size in files_in(self.path(step)))

    def files(self, step: int) -> list[Path]:
        """Return the seal of a step, and every file of it that is there."""
        return [self._sums(step), *sorted(path for path in self.path(step).rglob("*") if path.is_file())]

    def unseal(self, step: int) -> None:
        """Remove the seal of a step, which is about to change."""
        self._sums(step).unlink(missing_ok=True)

    def remove(self, step: int) -> None:
        """Remove a step, from its seal to its arrays. Raises `OSError`.

        A kill in the middle leaves a step without a seal, which does not count as complete.
        """
        # The seal goes first: a step that is half removed must not look complete.
        self.unseal(step)
        shutil.rmtree(self.path(step))

    def move(self, step: int, other: StepDir) -> None:
        """Move a step to another folder on the same disk, in place of the one with that number there."""
        # The seal follows the step: between the two moves the step has none, and would be read back.
        if step in other.steps():
            other.remove(step)
        other.folder.mkdir(parents=True, exist_ok=True)
        other._sums(step).parent.mkdir(exist_ok=True)
        self.path(step).rename(other.path(step))
        if self._sums(step).exists():
            self._sums(step).replace(other._sums(step))

    def keep(self, newest: int, every: int = 0) -> list[int]:
        """Remove steps that are older than the newest sealed step and not kept, and return them.

        Kept are the `newest` last ones, the multiples of `every` (0: none), and the newest that is known to be finite.
        A step without a seal is removed only where it would be removed with one.
        """
        sealed = self.sealed()
        # Without a sealed step nothing may be removed: the others may be damaged.
        if not sealed:
            return []
        steps = self.steps()
        kept = {*sealed[-newest:], *steps[-newest:]}
        if every:
            kept.update(step for step in steps if step % every == 0)
        finite = self._newest_finite(sealed)
        if finite is not None:
            kept.add(finite)
        removed = [step for step in steps if step < sealed[-1] and step not in kept]
        for step in removed:
            self.remove(step)
        return removed

    def _newest_finite(self, sealed: list[int]) -> int | None:
        """Return the newest step whose seal says that it is finite."""
        for step in reversed(sealed):
            seal = self.seal_of(step)
            if seal is not None and seal.finite:
                return step
        return None

    def clear(self) -> None:
        """Remove what a process that died while it saved has left half-written."""
        for torn in self.folder.glob(f"*{TORN}*"):
            # A link is removed itself: what it leads to is somebody else's.
            if torn.is_symlink():
                torn.unlink()
            else:
                shutil.rmtree(torn, ignore_errors=True)

    def _sums(self, step: int) -> Path:
        return self.folder / "sums" / f"{step}.json"


Compare = Callable[[StepDir, int, Mapping[str, Checksum]], str | None]
"""Returns what is wrong with these files of a step, as `differing` does."""


def differing(path: Path, files: Mapping[str, Checksum]) -> str | None:
    """Return which of these files of the step at `path` differs from its checksum, or cannot be read; None if none."""
    try:
        found = checksums_in(path, list(files))
    except OSError as error:
        return unreadable_file(error)
    for name, sums in files.items():
        if found[name] != sums:
            return f"{name} differs from its checksum"
    return None


def unreadable_file(error: OSError) -> str:
    """Return the damage that an error of reading shows."""
    return f"{error.filename} cannot be read ({error.strerror})"


def files_in(folder: Path) -> Iterator[tuple[Path, int | None]]:
    """Yield every file under `folder`, and its size: None unless it is a regular file. Raises `OSError`."""

    def fail(error: OSError) -> None:
        # os.walk, like Path.rglob, would silently leave out a folder that it cannot list.
        raise error

    for parent, folders, names in os.walk(folder, onerror=fail):
        for name in names:
            path = Path(parent, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                yield path, status.st_size
            else:
                yield path, None
        for name in folders:
            if Path(parent, name).is_symlink():
                yield Path(parent, name), None


def checksums_in(folder: Path, names: Sequence[str]) -> dict[str, Checksum]:
    """Return the checksums of files by their paths within `folder`. Reads each once; raises `OSError`."""
    names = sorted(names)
    return dict(zip(names, checksums([folder / name for name in names]), strict=True))
