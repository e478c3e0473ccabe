"""What checkpoints cost, on CPU devices.

    python benchmarks/checkpoint.py [block] [where] [sums] [seal] [mesh] [memory] [first]

block     how long a save keeps the quickstart's loop from its next step, beside that step and beside the whole save.
where     what the loop's own thread does while `block`'s save keeps it: the clock's time and the thread's own.
sums      reading a checkpoint for its checksums, beside writing it: both ends of a save in the background.
seal      the parts of sealing a step that is written: its checksums, reading it back, and the look for NaN before it.
mesh      restoring onto the mesh that saved, and onto another.
memory    what a process takes while it restores, over what it held before, beside the bytes of its own shards.
first     a run that goes on, from its start to its first step, beside one that begins. Programs are compiled by both.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from asyncio.unix_events import _UnixSelectorEventLoop as EventLoop
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from selectors import EpollSelector
from typing import Any
from unittest.mock import patch

import jax
import numpy as np

from jaxdist.config import Config
from jaxdist.training.checkpoint.finite_state import first_not_finite
from jaxdist.training.checkpoint.manager import Checkpoints, trees_of
from jaxdist.training.checkpoint.orbax_writer import array_shapes
from jaxdist.training.checkpoint.readback import unreadable
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.forward.step import TrainState
from jaxdist.training.run import Run

REPEATS = 5
LARGE = dict(layers=8, embed=1024, heads=8, vocab=8192, sequence=128)
"""109 million parameters: 1.3 GB with their moments."""


@contextmanager
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="checkpoint-", dir="."))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def noisy(run: Run) -> TrainState:
    """A state that does not compress: an optimizer that has seen no gradient is all zeros."""
    rng = np.random.default_rng(0)
    like = lambda a: rng.standard_normal(a.shape, np.float32) if a.dtype == np.float32 else np.zeros(a.shape, a.dtype)
    return jax.tree.map(lambda a: jax.device_put(like(a), a.sharding), run.engine.abstract_logical())


def facts(step: int) -> dict[str, Any]:
    """What a checkpoint must hold beside its arrays."""
    baseline = {"nats": 1.0, "name": "unigrams", "unit": "token"}
    return {"step": step, "steps": step, "data": "noise", "best": None, "baseline": baseline}


def size(state: TrainState) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def median(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{1e3 * middle:9.1f} ms ({1e3 * low:.1f} to {1e3 * high:.1f})"


def save(checkpoints: Checkpoints, shelf: StepDir, step: int, state: TrainState) -> tuple[float, float, float]:
    """Seconds until the call returns, until the step has its name, and until its checksums are there."""
    started = time.perf_counter()
    checkpoints.save(step, state, facts(step))
    blocked = time.perf_counter()
    while step not in shelf.steps():
        time.sleep(1e-3)
    written = time.perf_counter()
    while step not in shelf.sealed():
        time.sleep(1e-3)
    sealed = time.perf_counter()
    while len(shelf.steps()) > 1:  # the one before is removed, for which the next save would wait
        time.sleep(1e-3)
    return blocked - started, written - started, sealed - started


def block() -> None:
    run = Run(Config(mesh="1x1x1"))
    with jax.set_mesh(run.mesh), folder() as path, Checkpoints(path, keep=1) as checkpoints:
        shelf = StepDir(path / "checkpoints")
        batch = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), a.sharding), run.batch())
        step, state = run.compile(), run.engine.init()
        steps, blocked, whole = [], [], []
        for number in range(1, 4 * REPEATS + 1):
            started = time.perf_counter()
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            steps.append(time.perf_counter() - started)
            if number % 4 == 0:
                first, _, last = save(checkpoints, shelf, number, run.step.logical(state))
                blocked.append(first)
                whole.append(last)
    print(f"block       a step {median(steps)}, a save blocks {median(blocked)} of {median(whole)}")
    ratios = statistics.median(blocked) / statistics.median(steps), sum(blocked) / sum(whole)
    print(f"            {ratios[0]:.2f} of a step, {ratios[1]:.1%} of the save")


def parts() -> dict[str, list[tuple[Any, str]]]:
    """What Orbax 0.12 does before a save returns, by the functions that do it, which are its own affair; the rest is
    between them."""
    from absl import logging
    from orbax.checkpoint._src.handlers import base_pytree_checkpoint_handler as pytrees
    from orbax.checkpoint._src.serialization import replica_slices
    from orbax.checkpoint._src.serialization.async_io_engine import BatchRequest

    return {
        "starting threads": [(threading.Thread, "start")],
        "waiting for an executor's answer": [(EpollSelector, "select")],
        "opening and closing an event loop": [(EventLoop, "__init__"), (EventLoop, "close")],
        "taking the arrays to the host": [(replica_slices, "transfer_arrays_to_host")],
        "choosing which shards": [(replica_slices, "get_replica_slices")],
        "describing the leaves": [
            (pytrees.BasePyTreeCheckpointHandler, "_get_param_infos"),
            (pytrees, "batched_serialization_requests"),
            (pytrees, "_fill_missing_save_or_restore_args"),
            (BatchRequest, "__init__"),
        ],
        "logs and metrics that nobody reads": [
            *[(logging, name) for name in ("info", "vlog", "log_first_n")],
            *[(jax.monitoring, f"record_{name}") for name in ("event", "scalar", "event_duration_secs")],
        ],
    }


REST = "the rest"


def watched(call: Callable[[], object]) -> dict[str, Counter[str]]:
    """Seconds of this thread by the "clock" and of its "own", and "calls", for each of `parts()` while `call` runs.

    A part that is called by another counts there alone.
    """
    here, inside, spent = threading.current_thread(), [[0.0, 0.0]], defaultdict(Counter)

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **options: Any) -> Any:
            if threading.current_thread() is not here:
                return function(*args, **options)
            inside.append([0.0, 0.0])
            began = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **options)
            finally:
                took = time.perf_counter() - began[0], time.thread_time() - began[1]
                clock, own = inside.pop()
                inside[-1][0] += took[0]
                inside[-1][1] += took[1]
                spent[part].update(clock=took[0] - clock, own=took[1] - own, calls=1)

        return timed_call

    with ExitStack() as patches:
        for part, functions in parts().items():
            for owner, name in functions:
                patches.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        timed(REST, call)()
    return spent


def where() -> None:
    run = Run(Config(mesh="1x1x1"))
    with jax.set_mesh(run.mesh), folder() as path, Checkpoints(path, keep=1) as checkpoints:
        state, found = run.step.logical(run.engine.init()), []
        for step in range(1, 8 * REPEATS + 1):
            found.append(watched(lambda: checkpoints.save(step, state, facts(step))))  # noqa: B023
            checkpoints.wait()
    whole = lambda spent: sum(part["clock"] for part in spent.values())
    best = sorted(found[1:], key=whole)[: 2 * REPEATS]
    mean = lambda part, what: statistics.mean(spent[part][what] for spent in best)
    print(
        f"where       the quickest {len(best)} of {len(found)} saves: ms by the clock, of which the thread's own, calls"
    )
    for part in sorted([*parts(), REST], key=lambda part: -mean(part, "clock")):
        clock, own, calls = 1e3 * mean(part, "clock"), 1e3 * mean(part, "own"), mean(part, "calls")
        print(f"            {part:36}{clock:8.2f}{own:8.2f}{calls:6.0f}")
    clock, own = (1e3 * sum(mean(part, what) for part in [*parts(), REST]) for what in ("clock", "own"))
    print(f"            {'together':36}{clock:8.2f}{own:8.2f}")


def sums() -> None:
    run = Run(Config(mesh="1x1x1", model=LARGE))
    with jax.set_mesh(run.mesh), folder() as path, Checkpoints(path, keep=1) as checkpoints:
        state, shelf = noisy(run), StepDir(path / "checkpoints")
        found = [save(checkpoints, shelf, step, state) for step in range(1, REPEATS + 1)]
    blocked, written, sealed = ([times[i] for times in found] for i in range(3))
    extra = [end - begin for begin, end in zip(written, sealed, strict=True)]
    print(f"sums        {size(state) / 1e6:,.0f} MB: a save blocks {median(blocked)}, writes {median(written)}")
    print(f"            checksums {median(extra)}: {statistics.median(extra) / statistics.median(written):.1%}")


def seal() -> None:
    run = Run(Config(mesh="1x1x1", model=LARGE))
    with jax.set_mesh(run.mesh), folder() as path, Checkpoints(path, keep=1) as checkpoints:
        state, shelf = noisy(run), StepDir(path / "checkpoints")
        expected = {name: array_shapes(tree) for name, tree in trees_of(state).items()}
        first_not_finite(state)  # compiles it
        times: dict[str, list[float]] = defaultdict(list)
        for step in range(1, REPEATS + 1):
            times["save"].append(save(checkpoints, shelf, step, state)[2])
            times["checksums"].append(seconds(lambda: shelf.seal(step)))  # noqa: B023
            read_back = lambda: unreadable(shelf.path(step), expected, values=False)  # noqa: B023
            times["read back"].append(seconds(read_back))
            times["finite"].append(seconds(lambda: first_not_finite(state)))
    whole = statistics.median(times["save"])
    print(f"seal        {size(state) / 1e6:,.0f} MB: a save, sealed, takes {median(times['save'])}")
    for part in ("checksums", "read back", "finite"):
        print(f"            {part:<10} {median(times[part])}: {statistics.median(times[part]) / whole:.2%} of that")


def mesh() -> None:
    with folder() as path:
        found: dict[str, list[float]] = {}
        for number, shape in enumerate(["4x1x1", *["4x1x1", "2x2x1", "1x1x1"] * REPEATS]):
            config = Config(mesh=shape, model=LARGE, parallel=dict(zero=3 if shape != "1x1x1" else 0))
            run = Run(config)
            with jax.set_mesh(run.mesh), Checkpoints(path, keep=1 if number == 0 else None) as checkpoints:
                if number == 0:
                    checkpoints.save(1, noisy(run), facts(1))
                    continue
                abstract, step = run.engine.abstract_logical(), checkpoints.find()
                found.setdefault(shape, []).append(seconds(lambda: checkpoints.restore(abstract, step)))  # noqa: B023
    same = statistics.median(found["4x1x1"])
    for shape, times in found.items():
        print(f"mesh        4x1x1, ZeRO 3 -> {shape}: {median(times)}, {statistics.median(times) / same:.2f}x")


RESTORE = """
import sys, jax
from pathlib import Path
from jaxdist.config import Config
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.run import Run

status = lambda name: next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith(name))
run = Run(Config.model_validate_json(sys.argv[2]))
with jax.set_mesh(run.mesh), Checkpoints(Path(sys.argv[1]), keep=None) as checkpoints:
    abstract, found = run.engine.abstract_logical(), checkpoints.find()
    before = status("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far begins anew
    state = jax.block_until_ready(checkpoints.restore(abstract, found))
    own = sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
    print("took", own, status("VmHWM:") - before)
"""


def memory() -> None:
    big = LARGE | dict(layers=24)
    config = Config(mesh="1x1x1", model=big)
    run = Run(config)
    with folder() as path:
        with jax.set_mesh(run.mesh), Checkpoints(path, keep=1) as checkpoints:
            checkpoints.save(1, noisy(run), facts(1))
        command = [sys.executable, "-c", RESTORE, str(path), config.model_dump_json()]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    own, peak = map(int, said.split("took")[1].split())
    bound = 1.5 * own + 2**30
    print(f"memory      own shards {own / 2**20:,.0f} MiB, peak {peak / 2**20:,.0f} MiB more than before")
    print(f"            1.5 x + 1 GiB is {bound / 2**20:,.0f} MiB: {'kept' if peak < bound else 'BROKEN'}")


def first() -> None:
    fresh, resumed = [], []
    argv = ["--train.steps=40", "--log.every=1", "--checkpoint.every=5", "--validation.every=0"]
    with folder() as path:
        for number in range(REPEATS):
            fresh.append(_first_step(argv, path / str(number)))
            resumed.append(_first_step(argv, path / str(number)))
    ratio = statistics.median(resumed) / statistics.median(fresh)
    print(f"first       fresh {median(fresh)}, resumed {median(resumed)}: {ratio:.2f}x")


def _first_step(argv: list[str], path: Path) -> float:
    """Seconds from the start of a process until its first step is told; it is killed when a checkpoint is there."""
    started, metrics, shelf = time.perf_counter(), path / "metrics.jsonl", StepDir(path / "checkpoints")
    inode = metrics.stat().st_ino if metrics.exists() else None  # a run that goes on writes the file anew
    told = lambda: metrics.read_text().count('"loss"') if metrics.exists() and metrics.stat().st_ino != inode else 0
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxdist.train", f"--run-dir={path}", *argv], stderr=subprocess.DEVNULL
    )
    with process:
        while told() <= max(shelf.sealed(), default=0):
            time.sleep(2e-3)
        begun = time.perf_counter() - started
        while not shelf.sealed():
            time.sleep(2e-3)
        process.kill()
    return begun


def main() -> None:
    measures = dict(block=block, where=where, sums=sums, seal=seal, mesh=mesh, memory=memory, first=first)
    print(f"jax {jax.__version__}, {len(os.sched_getaffinity(0))} cores")
    for name in sys.argv[1:] or measures:
        measures[name]()


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main()
