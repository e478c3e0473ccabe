"""Write all pieces of a plan, in this process or in several.

The library `tokenizers` has threads of its own, which serve a few cores well and many badly, since all share one
instance. So where there are several pieces, each core takes one at a time, in a process with one such thread. The
processes are started anew and never forked (JAX has threads), and by a command, so that the user's script is not run
again as `multiprocessing` would do. As the pieces and not the processes say what is written, any number of them writes
the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from jaxdist.config import RequestError
from jaxdist.data.progress import Pass
from jaxdist.data.token_cache import Unfinished
from jaxdist.data.tokenizing.encoder import Encoder
from jaxdist.data.tokenizing.pieces import Plan
from jaxdist.data.tokenizing.worker import READ, REFUSED, WRITTEN

ONE_THREAD = {"TOKENIZERS_PARALLELISM": "true", "RAYON_NUM_THREADS": "1"}
"""Lets the library encode in one thread, and not in that of Python: this takes a fifth less CPU time than without its
threads (benchmarks/data.md)."""

LIFE_SECONDS = 1.0
"""Seconds after which a sign of life is given where no process tells anything."""


def core_count() -> int:
    """Return how many cores this process may use: taskset, Slurm and containers may allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def write_pieces(
    folder: Path,
    plan: Plan,
    tokenizer: Tokenizer,
    pieces: Iterable[int],
    reading: Pass,
    after_each: Callable[[], object],
    workers: int,
) -> None:
    """Write these pieces into a folder, which holds the plan and the tokenizer, with that many processes.

    The next piece is asked for when a process is free. `after_each` is called after each. Raises `RequestError` for
    what is wrong with the text.
    """
    if workers > 1:
        _Pool(folder, pieces, reading, after_each).run(workers)
        return
    encoder = Encoder(folder, plan, tokenizer)
    for piece in pieces:
        encoder.write(piece, reading.read)
        after_each()


class _Told(NamedTuple):
    """A line that a process has written."""

    process: subprocess.Popen[str]
    line: dict[str, Any] | None
    """None: it has ended."""


class _Pool:
    """Processes that write pieces, each the next one that is left."""

    def __init__(self, folder: Path, pieces: Iterable[int], reading: Pass, after_each: Callable[[], object]):
        self._folder = folder
        self._pieces = iter(pieces)
        self._given = 0
        """Pieces that processes are writing."""
        self._reading = reading
        self._after_each = after_each
        self._told: queue.SimpleQueue[_Told] = queue.SimpleQueue()

    def run(self, workers: int) -> None:
        """Start the processes, and end them when all is written or one refuses the text."""
        processes: list[subprocess.Popen[str]] = []
        try:
            for _ in range(workers):
                processes.append(self._start())
                self._give(processes[-1])
            while self._given:
                self._hear()
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()

    def _start(self) -> subprocess.Popen[str]:
        # It finds the same packages as this process, whatever has put them on its path.
        path = os.pathsep.join(place or os.getcwd() for place in sys.path)
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxdist.data.tokenizing.worker", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **ONE_THREAD},
        )
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()
        return process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout
        for line in process.stdout:
            self._told.put(_Told(process, json.loads(line)))
        self._told.put(_Told(process, None))

    def _give(self, process: subprocess.Popen[str]) -> None:
        """Give a process the next piece, if one is left."""
        piece = next(self._pieces, None)
        if piece is None:
            return
        assert process.stdin
        self._given += 1
        # That a process has ended is told by the thread that listens to it.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{piece}\n")
            process.stdin.flush()

    def _hear(self) -> None:
        """Hear what a process tells next."""
        try:
            process, line = self._told.get(timeout=LIFE_SECONDS)
        except queue.Empty:
            self._reading.read(0)
            return
        if line is None:
            raise Unfinished(
                f"a process that tokenizes has ended ({_how(process)}); what is tokenized is kept: start again, with "
                "more memory or fewer cores if the system has ended it"
            )
        if REFUSED in line:
            raise RequestError(*line[REFUSED])
        if READ in line:
            self._reading.read(line[READ])
        if WRITTEN in line:
            self._given -= 1
            self._give(process)
            self._after_each()


def _how(process: subprocess.Popen[str]) -> str:
    code = process.wait()
    return f"signal {-code}" if code < 0 else f"exit code {code}"
