"""Steps that Orbax writes in the background, sealed with checksums as soon as they are on disk; then old ones go.

A step is read back by those who wrote it and gets its checksums, and only then may it take the place of others:
whenever the process is killed, what it had before is complete.
"""

from __future__ import annotations

import errno
import gc
import itertools
import logging
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxdist.cluster.consensus import leader
from jaxdist.config import RequestError
from jaxdist.parallel.crossing.base import RESIDUAL
from jaxdist.parallel.crossing.outer import VELOCITY
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.training.checkpoint.readback import Shapes, unreadable
from jaxdist.training.checkpoint.shared_reading import SavedSums
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.checkpoint.stored_arrays import CHUNK_BYTES

ITEMS = ("params", "variables", "training", RESIDUAL, VELOCITY)
"""What a step may hold, each a tree of arrays that can be read alone; beside them stand the JSON-able `facts`."""

RESTORE_GB = 1
"""How much is read at a time, beside the arrays that are made of it; Orbax's own limit is 96."""

POLL = 0.02
"""Seconds between looks for a step that is being written."""

LONGEST_REASON = 200
"""Characters of somebody else's error message that are quoted."""

LISTED = 10
"""Arrays that an error names at most."""

NOT_WRITTEN = r"coroutine '.*\bwrite_fragment' was never awaited"
"""What Python says of a part of an array that Orbax has not begun to write."""

METER = ".mlp.meter"
"""How the name of a parameter ends that older checkpoints of routed models hold: zeros, which nothing reads."""


_saves = itertools.count()
"""Numbers the saves: every process makes the same ones, in the same order."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written: which, and why."""


class OrbaxWriter:
    """Saves the steps of one folder in the background, and restores them."""

    def __init__(
        self,
        step_dir: StepDir,
        keep: int,
        every: int = 0,
        kind: str = "",
        sealed: Callable[[int], None] | None = None,
    ):
        """Keep the `keep` newest steps, beside the multiples of `every` (0: none of them).

        `kind` is a word for the checkpoints here, for error messages. `sealed` is called, in a thread, with each step
        that is saved and has its seal; it may raise `OSError`.
        """
        _silence_orbax()
        self.step_dir = step_dir
        self._keep = keep
        self._every = every
        self._sealed = sealed
        self._kind = f"{kind} " if kind else ""
        options = _all_processes(step_dir.folder.name)
        handlers = {}
        for name in ITEMS:
            handlers[name] = ocp.StandardCheckpointHandler(
                restore_concurrent_gb=RESTORE_GB, multiprocessing_options=options
            )
        handler = ocp.CompositeCheckpointHandler(
            **handlers,
            facts=ocp.JsonCheckpointHandler(multiprocessing_options=options),
            composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        )
        self._orbax = ocp.AsyncCheckpointer(handler, multiprocessing_options=options)
        self.step: int | None = None
        """The newest that is saved, or being saved: it is not saved again."""
        self._sealing: threading.Thread | None = None
        self._sums: SavedSums | None = None
        self._given_up = threading.Event()
        self._failed: OSError | None = None
        self._has_failed = False

    def save(self, step: int, trees: dict[str, Any], facts: dict[str, Any]) -> None:
        """Begin to save; returns when the arrays of `trees` may be changed again.

        Raises `SaveFailed`, of this save or the last.
        """
        if step == self.step:
            return
        self.wait()
        self.step = step
        sums = SavedSums(next(_saves), self.step_dir.path(step))
        self._sums = sums
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        # They are the only ones that are read a part at a time, by an export.
        items["params"] = ocp.args.StandardSave(trees["params"], save_args=_chunks(trees["params"]))
        with self._raising_save_failed():
            if leader():
                self.step_dir.folder.mkdir(parents=True, exist_ok=True)
                # An old step with this number is overwritten: its seal must not stand beside other files.
                self.step_dir.unseal(step)
            contents = ocp.args.Composite(facts=ocp.args.JsonSave(facts), **items)
            self._orbax.save(self.step_dir.path(step), args=contents, force=True)
        # Orbax commits in the background: a thread waits for that, and the leader's seals the step.
        if leader():
            self._given_up = threading.Event()
            expected = {name: array_shapes(tree) for name, tree in trees.items()}
            arguments = (step, expected, sums, self._given_up)
            self._sealing = threading.Thread(target=self._seal, args=arguments, daemon=True)
        else:
            self._sealing = threading.Thread(target=sums.contribute, daemon=True)
        self._sealing.start()

    def check(self) -> None:
        """Raise `SaveFailed` if the current save, or the last one, has failed. Takes no time."""
        with self._raising_save_failed():
            self._orbax.check_for_errors()
        error = self._failed
        if error:
            # Each failure is reported once.
            self._failed = None
            raise self._failure(error) from error

    def wait(self, alone: bool = False) -> None:
        """Wait until the step that is being saved is sealed. Raises `SaveFailed`.

        `alone` waits for no other process, which may be gone: the leader reads what they wrote.
        """
        if alone and self._sums:
            self._sums.alone.set()
        with self._raising_save_failed():
            self._orbax.wait_until_finished()
        if self._sealing and (leader() or not alone):
            self._sealing.join()
        self.check()

    def close(self) -> None:
        """Close Orbax. Call `wait` first: failures are not reported here."""
        with suppress(Exception):
            self._orbax.close()
        if self._has_failed:
            # What Orbax has not written yet would complain, one by one, when Python ends.
            with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
                gc.collect()

    def restore(self, step: int, trees: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays of a step, laid out as `trees` says by `jax.ShapeDtypeStruct`s with shardings.

        Raises `RequestError` if names or shapes differ.
        """
        items = {name: ocp.args.StandardRestore(tree) for name, tree in trees.items()}
        path = self.step_dir.path(step)
        try:
            if self._compare(step, trees["params"]):
                return {name: _restored_part(path / name, tree) for name, tree in trees.items()}
            return dict(self._orbax.restore(path, args=ocp.args.Composite(**items)).items())
        except RequestError:
            raise
        except Exception as error:  # Orbax raises whatever its parts raise
            raise RequestError(f"checkpoint {path} cannot be read into this run: {_first_line(error)}") from error

    def shapes(self, step: int, item: str) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the arrays of an item by name; {} if the step does not hold it."""
        path = self.step_dir.path(step) / item
        if not path.exists():
            return {}
        return array_shapes(ocp.StandardCheckpointHandler().metadata(path).tree)

    def _compare(self, step: int, params: Any) -> bool:
        """Refuse parameters of other names and shapes before Orbax sees them: its errors do not name them.

        Return whether the step also holds the meters that routers had once, which are not read.
        """
        path = self.step_dir.path(step)
        there = array_shapes(ocp.StandardCheckpointHandler().metadata(path / "params").tree)
        here = array_shapes(params)
        meters = {name for name in there if name.endswith(METER)} - set(here)
        there = {name: shape for name, shape in there.items() if name not in meters}
        different = []
        for name in sorted({*there, *here}):
            if there.get(name) != here.get(name):
                different.append(f"{name} is {_shown(there.get(name))} there and {_shown(here.get(name))} here")
        if not different:
            return bool(meters)
        more = ""
        if len(different) > LISTED:
            more = f", and {len(different) - LISTED} more"
        raise RequestError(
            f"checkpoint {path} does not fit this model: {', '.join(different[:LISTED])}{more}; "
            f"give the model that was trained there (the [model] section of its config.toml, if it has one)"
        )

    def _seal(self, step: int, expected: dict[str, Shapes], sums: SavedSums, given_up: threading.Event) -> None:
        """Wait, in a thread, until the step has its name; check that it can be read, seal it, remove older steps."""
        try:
            while not self.step_dir.path(step).exists():
                if given_up.wait(POLL):
                    sums.give_up()
                    return
            sums.written()
            problem = unreadable(self.step_dir.path(step), expected, values=False)
            if problem:
                raise OSError(f"it is not there when it is read back ({problem})")
            self.step_dir.seal(step, sums.collect())
            if self._sealed:
                self._sealed(step)
            self.step_dir.keep(self._keep, self._every)
        except OSError as error:
            self._failed = error
            # Unless they know already that the step is written.
            sums.give_up()

    @contextmanager
    def _raising_save_failed(self) -> Iterator[None]:
        """Turn every error in the block into `SaveFailed`: Orbax raises whatever its parts raise."""
        try:
            yield
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> SaveFailed:
        """Return the error to raise; the step that was saved last may be sealed, and count as saved, all the same."""
        # The thread may be waiting for a step that will never be committed.
        self._given_up.set()
        if self._sealing and leader():
            # Nor may another process answer that has failed too.
            if self._sums:
                self._sums.alone.set()
            self._sealing.join()
        # Orbax and the thread may both have failed: that is one failure, and reported once.
        self._failed = None
        self._has_failed = True
        what = f"the {self._kind}checkpoint of step {self.step}"
        if self.step is not None and self.step_dir.seal_of(self.step) is not None:
            return SaveFailed(f"{what} is saved, but a later operation failed: {_cause(error)}")
        return SaveFailed(f"{what} could not be saved: {_cause(error)}")


def _restored_part(item: Path, tree: Any) -> Any:
    """Return the arrays of an item that `tree` names, of those that it holds."""
    args = ocp.checkpoint_utils.construct_restore_args(tree)
    return ocp.PyTreeCheckpointHandler().restore(
        item, args=ocp.args.PyTreeRestore(tree, restore_args=args, partial_restore=True)
    )


@cache
def _silence_orbax() -> None:
    """Keep Orbax from logging what it also raises."""
    # When Orbax gives up, what it has not begun to write complains as soon as it is freed, wherever that is.
    warnings.filterwarnings("ignore", NOT_WRITTEN, RuntimeWarning)
    # The tasks that it leaves behind fail in an event loop that is closed; Python prints that.
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())
    hook = sys.unraisablehook

    def hook_without_closed_loops(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and "loop is closed" in str(error)):
            hook(unraisable)

    sys.unraisablehook = hook_without_closed_loops


def _chunks(tree: Any) -> Any:
    """Return for each array how it is cut into chunks: large ones into parts that can be read alone, layer by layer."""

    def of_array(path: Any, leaf: Any) -> ocp.SaveArgs:
        if leaf.size * leaf.dtype.itemsize <= CHUNK_BYTES:
            return ocp.SaveArgs()
        # Orbax cuts these axes first, and down to 1.
        first = (0,) if _key_name(path[0]) == BLOCKS else ()
        return ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES, shard_axes=first)

    return jax.tree_util.tree_map_with_path(of_array, tree)


def _cause(error: BaseException | None) -> str:
    """Return the operating system's reason, if the chain of errors has one; otherwise the error's first line."""
    first = error
    while error is not None:
        number = getattr(error, "errno", None) or _tensorstore_errno(error)
        if number:
            reason = os.strerror(number).lower()
            where = getattr(error, "filename", None)
            if where and number != errno.ENOSPC:
                reason += f" ({where})"
            return reason
        error = error.__cause__ or error.__context__
    return _first_line(first) or type(first).__name__


def _tensorstore_errno(error: BaseException) -> int | None:
    """Return the operating system's error number that TensorStore writes into its message."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else None


def _first_line(error: BaseException | None) -> str:
    return str(error).strip().partition("\n")[0][:LONGEST_REASON]


def array_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of every array of a tree, by the name that it has in a checkpoint, such as `blocks.mlp.up`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_has_shape)
    return {".".join(map(_key_name, path)): _stored_shape(leaf) for path, leaf in leaves}


def _has_shape(leaf: Any) -> bool:
    return hasattr(leaf, "shape")


def _key_name(key: Any) -> str:
    """Return the name of one key of a path: that of a dict, a sequence, or a class with fields."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _stored_shape(leaf: Any) -> tuple[int, ...]:
    """Return the shape on disk."""
    # Random keys are stored as the integers that they consist of.
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return tuple(jax.eval_shape(jax.random.key_data, leaf).shape)
    return tuple(leaf.shape)


def _shown(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else str(tuple(shape))


def _all_processes(name: str) -> ocp.options.MultiprocessingOptions:
    """Return options that list all processes by their numbers."""
    # Without the list they would wait for each other by a collective of devices, for which JAX wants the same number
    # of devices in each process.
    everyone = set(range(jax.process_count()))
    return ocp.options.MultiprocessingOptions(active_processes=everyone, barrier_sync_key_prefix=name)
