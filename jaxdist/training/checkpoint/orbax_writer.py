"""Steps that Orbax writes in the background, sealed with checksums as soon as they are on disk, then the old removed.

A step is read back and gets its checksums, and only then may it take the place of others: whenever the process is
killed, what it had before is whole.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxdist.cluster.consensus import leader
from jaxdist.config import RequestError
from jaxdist.training.checkpoint.readback import Shapes, unreadable
from jaxdist.training.checkpoint.step_dir import StepDir

ITEMS = ("params", "variables", "training")
"""What a step may hold, each a tree of arrays that can be read alone; beside them stand the JSON-able `facts`."""

RESTORE_GB = 1
"""So much is read at a time beside the arrays that are made of it; Orbax's own limit is 96."""

POLL = 0.02
"""Seconds between looks for a step that is being written."""


class SaveFailed(RuntimeError):
    """A checkpoint could not be written: which, and why."""


class OrbaxWriter:
    """One shelf. `keep` is how many of the newest steps to keep, beside those that `every` divides (0: none)."""

    def __init__(self, shelf: StepDir, keep: int, every: int = 0, kind: str = ""):
        """`kind` is a word for the checkpoints here, for sentences."""
        _raised_is_enough()
        self.shelf, self._keep, self._every = shelf, keep, every
        self._kind = f"{kind} " if kind else ""
        options = _all_processes(shelf.folder.name)
        array = lambda: ocp.StandardCheckpointHandler(restore_concurrent_gb=RESTORE_GB, multiprocessing_options=options)
        handler = ocp.CompositeCheckpointHandler(
            **{name: array() for name in ITEMS},
            facts=ocp.JsonCheckpointHandler(multiprocessing_options=options),
            composite_options=ocp.CompositeOptions(multiprocessing_options=options),
        )
        self._orbax = ocp.AsyncCheckpointer(handler, multiprocessing_options=options)
        self.step: int | None = None
        """The newest that is saved, or being saved: it is not saved again."""
        self._sealing: threading.Thread | None = None
        self._given_up = threading.Event()
        self._failed: OSError | None = None

    def save(self, step: int, trees: dict[str, Any], facts: dict[str, Any]) -> None:
        """Returns when the arrays of `trees` may be changed again. Raises `SaveFailed`, of this save or the last."""
        if step == self.step:
            return
        self.wait()
        self.step = step
        items = {name: ocp.args.StandardSave(tree) for name, tree in trees.items()}
        with self._told():
            if leader():
                self.shelf.folder.mkdir(parents=True, exist_ok=True)
                self.shelf.unseal(step)
            contents = ocp.args.Composite(facts=ocp.args.JsonSave(facts), **items)
            self._orbax.save(self.shelf.path(step), args=contents, force=True)
        if leader():
            self._given_up = threading.Event()
            expected = {name: array_shapes(tree) for name, tree in trees.items()}
            self._sealing = threading.Thread(target=self._seal, args=(step, expected, self._given_up), daemon=True)
            self._sealing.start()

    def check(self) -> None:
        """Raise `SaveFailed` if what is being saved, or was, did not get to the disk. Takes no time."""
        with self._told():
            self._orbax.check_for_errors()
        if self._failed:
            error, self._failed = self._failed, None  # told once
            raise self._failure(error) from error

    def wait(self) -> None:
        """Until what is being saved is sealed. Raises `SaveFailed`."""
        with self._told():
            self._orbax.wait_until_finished()
        if self._sealing:
            self._sealing.join()
        self.check()

    def close(self) -> None:
        """Call `wait` first: what failed is not told here."""
        with suppress(Exception):
            self._orbax.close()

    def restore(self, step: int, trees: dict[str, Any]) -> dict[str, Any]:
        """Arrays as `trees` says by `jax.ShapeDtypeStruct`s with shardings. Raises `RequestError` if they differ."""
        items = {name: ocp.args.StandardRestore(tree) for name, tree in trees.items()}
        try:
            self._compare(step, trees["params"])
            return dict(self._orbax.restore(self.shelf.path(step), args=ocp.args.Composite(**items)).items())
        except RequestError:
            raise
        except Exception as error:  # as in `save`
            reason = str(error).strip().partition("\n")[0][:200]
            raise RequestError(f"checkpoint {self.shelf.path(step)} cannot be read into this run: {reason}") from error

    def read(self, step: int, item: str) -> Any:
        """A tree as it was saved, on the first device; {} if the step does not hold it."""
        path, handler = self.shelf.path(step) / item, ocp.StandardCheckpointHandler(restore_concurrent_gb=RESTORE_GB)
        if not path.exists():
            return {}
        there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=there)
        tree = jax.tree.map(like, handler.metadata(path).tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))
        return handler.restore(path, args=ocp.args.StandardRestore(tree))

    def _compare(self, step: int, here: Any) -> None:
        """Refuse parameters of other names and shapes before Orbax looks at them, which does not name them."""
        there = ocp.StandardCheckpointHandler().metadata(self.shelf.path(step) / "params").tree
        there, here = array_shapes(there), array_shapes(here)
        told = lambda shape: "missing" if shape is None else str(tuple(shape))
        different = [
            f"{path} is {told(there.get(path))} there and {told(here.get(path))} here"
            for path in sorted({*there, *here})
            if there.get(path) != here.get(path)
        ]
        if different:
            more = f", and {len(different) - 10} more" if len(different) > 10 else ""
            raise RequestError(
                f"checkpoint {self.shelf.path(step)} does not fit this model: {', '.join(different[:10])}{more}; "
                f"use the [model] section of its config.toml"
            )

    def _seal(self, step: int, expected: dict[str, Shapes], given_up: threading.Event) -> None:
        """In a thread: wait until the folder has its name, see that it can be read, seal it, remove what is older."""
        try:
            while not self.shelf.path(step).exists():
                if given_up.wait(POLL):
                    return
            if problem := unreadable(self.shelf.path(step), expected, values=False):
                raise OSError(f"it is not there when it is read back ({problem})")
            self.shelf.seal(step)
            self.shelf.keep(self._keep, self._every)
        except OSError as error:
            self._failed = error

    @contextmanager
    def _told(self) -> Iterator[None]:
        """What goes wrong in here is a `SaveFailed`: Orbax raises what its parts raise."""
        try:
            yield
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> SaveFailed:
        """The step that was saved last may have its seal, and count as saved, in spite of `error`."""
        self._given_up.set()
        if self._sealing:
            self._sealing.join()
        what = f"the {self._kind}checkpoint of step {self.step}"
        if self.step is not None and self.shelf.seal_of(self.step) is not None:
            return SaveFailed(f"{what} is saved, but what is done after that failed: {_cause(error)}")
        return SaveFailed(f"{what} could not be saved: {_cause(error)}")


@cache
def _raised_is_enough() -> None:
    """Orbax logs what it raises, too; and when it gives up, what it was doing fails in a loop that is closed."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").addFilter(lambda record: "exception was never retrieved" not in record.getMessage())
    hook, noise = sys.unraisablehook, lambda error: isinstance(error, RuntimeError) and "loop is closed" in str(error)
    sys.unraisablehook = lambda told: None if noise(told.exc_value) else hook(told)


def _cause(error: BaseException | None) -> str:
    """The operating system's reason, if there is one."""
    first = error
    while error is not None:
        found = re.search(r"os_error_code='(\d+)'", str(error))  # TensorStore's
        number = getattr(error, "errno", None) or (found and int(found[1]))
        if number:
            where = getattr(error, "filename", None)
            return os.strerror(number).lower() + (f" ({where})" if where and number != errno.ENOSPC else "")
        error = error.__cause__ or error.__context__
    return str(first).strip().partition("\n")[0][:200] or type(first).__name__


def array_shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every array of a tree, by the name that it has in a checkpoint, such as `blocks.mlp.up`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    name = lambda key: str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))
    return {".".join(map(name, path)): _stored_shape(leaf) for path, leaf in leaves}


def _stored_shape(leaf: Any) -> tuple[int, ...]:
    """Random keys are stored as the integers that they consist of."""
    if isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return tuple(jax.eval_shape(jax.random.key_data, leaf).shape)
    return tuple(leaf.shape)


def _all_processes(name: str) -> ocp.options.MultiprocessingOptions:
    """All of them, by their numbers: left out, they would wait for each other by a collective of devices, of which
    JAX's wants the same number in each process."""
    everyone = set(range(jax.process_count()))
    return ocp.options.MultiprocessingOptions(active_processes=everyone, barrier_sync_key_prefix=name)
