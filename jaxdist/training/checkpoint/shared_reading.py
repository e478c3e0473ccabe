"""Checksums of a step's files, computed by all processes of a run, each for its share: no file is read twice.

After a save each process reads what it wrote itself, which may still be in its host's memory. Before a restore the
files are dealt by size. The leader hears what the others found; no process but it reads the seal.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxdist.cluster import kv_store
from jaxdist.cluster.consensus import Errands, dealt, hear, tell
from jaxdist.files import Checksum
from jaxdist.training.checkpoint.step_dir import StepDir, checksums_in, differing, files_in

WRITTEN_BY = re.compile(r"(?:^|/)(?:ocdbt\.process_|array_metadatas/process_)(\d{1,9})(?:/|$)", re.ASCII)
"""Where Orbax's names of files say which process writes them; all other files are written by process 0."""

PATIENCE = 60.0
"""Seconds that the leader waits for the checksums of others, at least, before it reads their files itself."""

PATIENCE_FACTOR = 4
"""How many times longer than its own share takes the leader waits for them, where that is more."""

POLL = 1.0
"""Seconds between two looks whether to go on waiting for them."""


def written_by(name: str, processes: int) -> int:
    """Return which of `processes` writes the file with this path within a step."""
    found = WRITTEN_BY.search(name)
    process = int(found[1]) if found else 0
    # What an earlier job with more processes has left is nobody's.
    return process if process < processes else 0


def own_checksums(path: Path, process: int) -> dict[str, Checksum]:
    """Return the checksums of what `process`, which is not the first, wrote of the step at `path`.

    Looks at no other file. Raises `OSError`.
    """
    names = []
    for item in path.iterdir():
        folder = item / f"ocdbt.process_{process}"
        names += [str(file.relative_to(path)) for file, _ in files_in(folder)] if folder.is_dir() else []
        described = item / "array_metadatas" / f"process_{process}"
        names += [str(described.relative_to(path))] if described.is_file() else []
    return checksums_in(path, names)


class SavedSums:
    """The checksums of a step that all processes have saved, on their way to the leader.

    All processes make one, in the same order, for each save.
    """

    def __init__(self, number: int, path: Path):
        self._name = f"saved sums/{number}"
        self._path = path
        self.alone = threading.Event()
        """Set where the leader should not wait for the others any more, but read the files itself."""

    def contribute(self) -> None:
        """Wait until the leader knows that the step is written; send it what this process wrote. No error is raised."""
        try:
            if kv_store.read(self._name) != "written":
                return
            own = own_checksums(self._path, kv_store.process())
        except TimeoutError:
            return  # the job has ended
        except OSError:
            # The leader reads them, and says what is wrong.
            own = {}
        tell(f"{self._name}/{kv_store.process()}", json.dumps(own))

    def give_up(self) -> None:
        """Tell the other processes that nothing will be sealed; the leader calls this."""
        if kv_store.processes() > 1:
            kv_store.post(self._name, "given up")

    def written(self) -> None:
        """Tell the others that the step is written; the leader calls this."""
        if kv_store.processes() > 1:
            kv_store.post(self._name, "written")

    def collect(self) -> dict[str, Checksum]:
        """Return the checksums of all files; the leader calls this, after `written`. Raises `OSError`.

        What another process does not send in time, or sees otherwise, the leader reads itself.
        """
        processes = kv_store.processes()
        began = time.monotonic()
        sizes = {str(file.relative_to(self._path)): size for file, size in files_in(self._path)}
        own = [name for name in sizes if written_by(name, processes) == 0]
        sums = checksums_in(self._path, own)
        took = time.monotonic() - began
        deadline = began + took + max(PATIENCE, PATIENCE_FACTOR * took)
        all_answered = True
        for process in range(1, processes):
            found = self._heard(process, deadline)
            all_answered = all_answered and found is not None
            for name, (size, digest) in (found or {}).items():
                if sizes.get(name) == size:
                    sums[name] = (size, digest)
        if processes > 1 and all_answered:
            kv_store.forget(self._name)
        return sums | checksums_in(self._path, [name for name in sizes if name not in sums])

    def _heard(self, process: int, deadline: float) -> dict[str, Any] | None:
        """Return what a process sends; None where it sends nothing by the deadline, or the leader is alone."""
        while not self.alone.is_set():
            left = deadline - time.monotonic()
            try:
                return json.loads(hear(f"{self._name}/{process}", max(min(POLL, left), 0.01)))
            except TimeoutError:
                # It is raised at once where the job has ended.
                if left <= 0 or self.alone.wait(0.01):
                    return None
        return None


class SharedReading:
    """Reads the files of steps in all processes at once, while the others wait for what the leader finds.

    All processes make one, in the same order, with the same folders of steps, which all see alike.
    """

    def __init__(self, folders: Sequence[StepDir]):
        self._folders = list(folders)
        self.errands = Errands(self._do)

    def differing(self, step_dir: StepDir, step: int, files: Mapping[str, Checksum]) -> str | None:
        """Return what is wrong with files of a step, as `step_dir.differing` does; the leader calls this."""
        shares = dealt({name: size for name, (size, _) in files.items()}, kv_store.processes())
        place = self._folders.index(step_dir)
        found = self.errands.deal([[place, step, {name: files[name] for name in share}] for share in shares])
        return next(filter(None, found), None)

    def _do(self, part: Sequence[Any]) -> str | None:
        place, step, files = part
        sums = {name: (size, digest) for name, (size, digest) in files.items()}
        return differing(self._folders[place].path(step), sums)
