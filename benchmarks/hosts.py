"""What a job of many processes says, reads and computes beside its steps: 1,024 of them, simulated on one machine.

    python -m benchmarks.hosts [PROCESSES ...]

from the root of the repository. Every process is a thread with a client of its own of JAX's real coordination service,
and all share a real folder. What each calls is the code of a run; nothing is computed, and no array exists. One process
is lost and one is slow, and both must be named. For each part of a run the table has, of process 0 and of the one other
that does the most: messages to and from the key-value store, operations on files, bytes that are read for
checksums, and the thread's own CPU time. `tests/cluster/test_many_hosts.py` bounds the counts for 64 processes.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import numpy as np
from jax._src.lib import _jax

from jaxdist import files
from jaxdist.cluster import consensus, heartbeat, kv_store, rendezvous
from jaxdist.cluster.heartbeat import STEPPING, Heartbeat, HeartbeatWriter
from jaxdist.cluster.preflight import check_folder
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.stopping import Stop
from jaxdist.cluster.watchdog import Watchdog
from jaxdist.output.streams import LogFile
from jaxdist.training.checkpoint.shared_reading import SavedSums, SharedReading
from jaxdist.training.checkpoint.step_dir import StepDir

LOST, SLOW = 5, 9
"""The process that is lost, and the one whose steps take three times as long."""

STEP = 100
FILE = 4096
"""Bytes of a file of arrays here; a real one has up to gigabytes."""

ON_FILES = {"open", "os.scandir", "os.listdir", "os.mkdir", "os.rename", "os.remove", "os.utime", "glob.glob"}
"""Python's audit events that count as an operation on files, beside `os.stat`."""

_here = threading.local()
_spent: Counter[tuple[int, str]] | None = None


class Part(NamedTuple):
    """What process 0, and whichever of the others does the most of it, spend on a part of a run."""

    name: str
    messages: tuple[int, int]
    operations: tuple[int, int]
    read: tuple[int, int]
    """Bytes."""
    cpu: tuple[float, float]
    """Milliseconds."""
    seconds: float
    """Of all together, on this machine."""


def count(what: str, many: int = 1) -> None:
    number = getattr(_here, "number", None)
    if _spent is not None and number is not None:
        _spent[number, what] += many


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    # `open` with a descriptor opens nothing.
    if _spent is not None and event in ON_FILES and not (event == "open" and isinstance(arguments[0], int)):
        count("operations")


sys.addaudithook(_audit)


class Client:
    """JAX's client of a process, whose messages are counted."""

    def __init__(self, client: Any):
        self.client = client

    def key_value_set(self, name: str, text: str) -> None:
        count("messages")
        self.client.key_value_set(name, text)

    def blocking_key_value_get(self, name: str, milliseconds: int) -> str:
        count("messages")
        return self.client.blocking_key_value_get(name, milliseconds)

    def key_value_delete(self, name: str) -> None:
        count("messages")
        self.client.key_value_delete(name)


class Simulation:
    """Processes that are threads; a context manager."""

    def __init__(self, processes: int, folder: Path):
        self.processes = processes
        self.folder = folder
        self.checkpoints = StepDir(folder / "checkpoints")
        self.log = LogFile()
        self.parts: list[Part] = []

    def __enter__(self) -> Simulation:
        address = f"127.0.0.1:{_free_port()}"
        self.address = address
        self._service = _jax.get_distributed_runtime_service(address, self.processes)
        self._clients = [_jax.get_distributed_runtime_client(address, i) for i in range(self.processes)]
        with ExitStack() as stack:
            stack.enter_context(_in_place_of_jax(self.processes))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()
        self.log.close()
        self.all(lambda number: self._clients[number].shutdown())
        self._service.shutdown()

    def all(self, call: Callable[[int], Any]) -> list[Any]:
        """Return what the call returns in each process, with its number; raise what one of them raises."""
        found: list[Any] = [None] * self.processes
        errors: list[Exception] = []

        def run(number: int) -> None:
            _here.number, _here.client = number, Client(self._clients[number])
            began = time.thread_time()
            try:
                found[number] = call(number)
            except Exception as error:
                errors.append(error)
            count("cpu", int(1e6 * (time.thread_time() - began)))

        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(self.processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return found

    def part(self, name: str, call: Callable[[int], Any]) -> list[Any]:
        """Call it in each process, and note what that took."""
        global _spent
        _spent = Counter()
        began = time.perf_counter()
        found = self.all(call)
        took, spent, _spent = time.perf_counter() - began, _spent, None

        def of(what: str) -> tuple[int, int]:
            return spent[0, what], max(spent[number, what] for number in range(1, self.processes))

        cpu = of("cpu")
        self.parts.append(Part(name, of("messages"), of("operations"), of("read"), (cpu[0] / 1e3, cpu[1] / 1e3), took))
        return found

    def run(self) -> list[Part]:
        """Take part after part; AssertionError where what a run must find is not found."""
        self.part("rendezvous", self._meet)
        self.part("check of the folder", lambda number: check_folder(self.folder, 0))
        self.log.open(self.folder / "log.txt", rotates=True)
        self.part("a logged step", self._log)
        _write_step(self.checkpoints.path(STEP), self.processes)
        self.part("checksums after a save", self._seal)
        assert self.part("checksums before a resume", self._verify)[0] is None
        self.part("a stop is agreed on", self._stop)
        assert all(self.part("all come to the end", lambda number: consensus.all_come(120)))
        self.part("a heartbeat", self._beat)
        self._check_slow()
        self._lose()
        self.part("a look for lost processes", self._look)
        hung = self.part("a hang", self._hang)
        expected = f"the others wait for process {LOST} on "
        assert all(len(one) == 1 and one[0].startswith(expected) for i, one in enumerate(hung) if i != LOST), hung[0]
        return self.parts

    def _meet(self, number: int) -> None:
        self._clients[number].connect()
        with patch.object(rendezvous, "_members", []):
            rendezvous._introduced(self.address, devices=8)

    def _log(self, number: int) -> None:
        """The clock of process 0 decides whether to save; it writes a line."""
        consensus.from_leader(0)
        if number == 0:
            self.log.write("step 100: loss 1.0")

    def _seal(self, number: int) -> None:
        sums = SavedSums(0, self.checkpoints.path(STEP))
        if number == 0:
            sums.written()
            self.checkpoints.seal(STEP, sums.collect())
        else:
            sums.contribute()

    def _verify(self, number: int) -> str | None:
        shared = SharedReading([self.checkpoints])
        if number != 0:
            shared.errands.help()
            return None
        damage = self.checkpoints.damage(STEP, compare=shared.differing)
        shared.errands.end()
        return damage

    def _stop(self, number: int) -> int:
        stop = Stop(self._env(number), 60.0, lambda: "stepping")
        stop._passed = STEP - number % 2
        return stop._first_not_passed()

    def _beat(self, number: int) -> None:
        HeartbeatWriter._write(
            SimpleNamespace(folder=self.folder / "heartbeats", _look=self._beats(number), _code=None)
        )

    def _beats(self, number: int) -> Callable[[], Heartbeat]:
        seconds = 1.5 if number == SLOW else 0.5
        return lambda: Heartbeat(
            number, self.processes, f"n{number}", 1, STEP, STEPPING, 60.0, step_seconds=seconds, data_seconds=0.01
        )

    def _check_slow(self) -> None:
        began = time.thread_time()
        beats = heartbeat.read(self.folder / "heartbeats")
        read = time.thread_time()
        slow = heartbeat.stragglers(beats, time.time())
        self.looking = 1e3 * (read - began), 1e3 * (time.thread_time() - read)
        assert list(slow) == [SLOW], slow
        assert slow[SLOW].startswith("a step takes 1.5 s"), slow

    def _lose(self) -> None:
        """Age the heartbeat of the process that is lost."""
        path = self.folder / "heartbeats" / f"{LOST}.json"
        then = time.time() - 10 * heartbeat.every(self.processes)
        os.utime(path, (then, then))

    def _look(self, number: int) -> None:
        if number > 1:
            return
        dog = self._dog(number)
        with patch("jaxdist.cluster.faults.say"):
            dog._look_for_lost()
        assert dog._reported == ({LOST} if number == 0 else set()), dog._reported

    def _hang(self, number: int) -> list[str]:
        return [] if number == LOST else self._dog(number)._ask_for_stragglers()

    def _dog(self, number: int) -> Watchdog:
        dog = Watchdog(self._env(number), 0)
        dog._heartbeat = SimpleNamespace(folder=self.folder / "heartbeats")  # type: ignore[assignment]
        return dog

    def _env(self, number: int) -> ProcessEnv:
        return ProcessEnv(self.processes, number, self.address)


@contextmanager
def _in_place_of_jax(processes: int) -> Iterator[None]:
    """Let the code of a run see each thread as a process of so many, and count what it does with files."""
    stat = os.stat

    def counted_stat(*arguments: Any, **options: Any) -> os.stat_result:
        count("operations")
        return stat(*arguments, **options)

    def counted_checksum(path: Path) -> files.Checksum:
        found = checksum(path)
        count("read", found[0])
        return found

    def post(name: str, text: str) -> bool:
        try:
            _here.client.key_value_set(f"jaxdist/{name}", text)
        except Exception:  # the name is taken
            return False
        return True

    checksum = files.checksum
    like_jax = SimpleNamespace(process_count=lambda: processes, process_index=lambda: _here.number)
    with ExitStack() as stack:
        for owner, name, value in (
            (os, "stat", counted_stat),
            (files, "checksum", counted_checksum),
            # The threads of a process would be nobody's here.
            (files, "ThreadPoolExecutor", _InPlace),
            # What an earlier job of this program has answered is not in the store of this one.
            (consensus, "_answered", []),
            (kv_store, "processes", lambda: processes),
            (kv_store, "process", lambda: _here.number),
            (kv_store, "_client", lambda: _here.client),
            # Without the thread of its own in which a run posts.
            (kv_store, "post", post),
            (consensus, "jax", like_jax),
            (consensus, "_questions", _Questions(processes)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


class _Questions:
    """Numbers the exchanges of each process."""

    def __init__(self, processes: int):
        self._numbers = [itertools.count() for _ in range(processes)]

    def __next__(self) -> int:
        return next(self._numbers[_here.number])


class _InPlace:
    """Runs the work of a pool of threads in the thread that asks."""

    def __init__(self, workers: int):
        pass

    def __enter__(self) -> _InPlace:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def map(self, call: Callable[..., Any], items: Any) -> Any:
        return map(call, items)


def _write_step(path: Path, processes: int) -> None:
    """Write files as Orbax leaves them after a save: those of each process, and what process 0 has merged."""
    noise = np.random.default_rng(0)

    def write(name: str, size: int) -> None:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(noise.bytes(size))

    for item in ("params", "training"):
        write(f"{item}/_METADATA", 300)
        write(f"{item}/manifest.ocdbt", 116)
        write(f"{item}/d/merged", 900)
        for process in range(processes):
            write(f"{item}/array_metadatas/process_{process}", 140)
            write(f"{item}/ocdbt.process_{process}/manifest.ocdbt", 119)
            for number in range(2):
                write(f"{item}/ocdbt.process_{process}/d/{number:x}{process:031x}", FILE)
    facts = {"step": STEP, "steps": STEP, "data": "noise", "best": None, "baseline": None}
    (path / "facts").mkdir()
    (path / "facts" / "metadata").write_text(json.dumps(facts))


def _free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def main(words: list[str]) -> None:
    print(
        f"jax {jax.__version__}, {len(os.sched_getaffinity(0))} cores; of each pair: process 0, the most of any other"
    )
    for processes in map(int, words or ["64", "256", "1024"]):
        with (
            tempfile.TemporaryDirectory(dir=".") as folder,
            Simulation(processes, Path(folder).resolve()) as simulation,
        ):
            began = time.process_time()
            parts = simulation.run()
            cpu = time.process_time() - began
        print(f"\n{processes} processes: {cpu:.1f} s of CPU time in all, the service included")
        print(f"{'':28}{'messages':>14}{'file operations':>18}{'KB read':>16}{'CPU ms':>18}{'s in all':>10}")
        for part in parts:
            pair = lambda values, form="": " ".join(f"{value:{form}}" for value in values)
            read = pair((part.read[0] / 1e3, part.read[1] / 1e3), ".1f")
            print(
                f"{part.name:28}{pair(part.messages):>14}{pair(part.operations):>18}{read:>16}"
                f"{pair(part.cpu, '.1f'):>18}{part.seconds:10.2f}"
            )
        reading, comparing = simulation.looking
        print(
            f"{'doctor RUN':28}reads {processes} heartbeats in {reading:.0f} ms, finds the slow in {comparing:.1f} ms"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
