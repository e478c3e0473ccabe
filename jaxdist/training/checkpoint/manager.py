"""The checkpoints of a run: its newest steps, and the one with the best validation loss; which of them to resume from.

A checkpoint does not depend on a mesh: arrays are logical, layers are stacked as [L, ...], parameters are f32. The
position in the data is the step, because the order of the data is a function of (seed, step).

    checkpoints/STEP, sums/STEP.json    the newest, and those that are kept for good
    checkpoints/best/                   the same, of one step
    checkpoints/aside/, aside/best/     steps that the run went back behind: damaged, or not wanted any more
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.cluster.consensus import agreed, from_leader, leader
from jaxdist.config import RequestError
from jaxdist.models import Params
from jaxdist.parallel.crossing import replicas
from jaxdist.parallel.crossing.base import RESIDUAL
from jaxdist.training.checkpoint.orbax_writer import OrbaxWriter, SaveFailed, array_shapes
from jaxdist.training.checkpoint.readback import Shapes, unreadable
from jaxdist.training.checkpoint.shared_reading import SharedReading
from jaxdist.training.checkpoint.step_dir import STEP, UNSEALED, StepDir
from jaxdist.training.checkpoint.stored_arrays import StoredArray, open_arrays
from jaxdist.training.copies import check_weights
from jaxdist.training.forward.loss_scale import first
from jaxdist.training.forward.spikes import none_yet
from jaxdist.training.forward.step import TrainState
from jaxdist.training.run_facts import note_saved, run_id

LATEST = "latest"
BEST = "best"
ASIDE = "aside"

LOSS_SCALE, RECENT = "loss_scale", "recent"
"""The names there of what only runs with a scaled loss, or without spikes, have."""

FROZEN = "frozen."
"""Begins the names of frozen parameters among what a step holds for training."""

OPTIMIZER = "optimizer."
"""Begins the names of the optimizer's arrays there."""

Expected = Callable[[], TrainState] | None
"""Makes the shapes that a checkpoint without checksums must have; None accepts any."""


class Found(NamedTuple):
    """A step that was complete when it was found."""

    store: OrbaxWriter
    step: int


class Checkpoints:
    """The folder `checkpoints/` of a run; saves in the background. Use it as a context manager.

    Every process of a run calls every method; the leader looks at the disk, and all follow what it finds.
    """

    def __init__(self, run_dir: Path, keep: int | None, every: int = 0, thorough: bool = True):
        """Open the folder.

        `keep` is how many of the newest steps to keep, beside the multiples of `every` (0: none of them); None only
        reads, and changes nothing on disk. Where not `thorough`, of sealed steps only the sizes of files are compared:
        for who has just read them through.
        """
        folder = Path(run_dir).resolve() / "checkpoints"
        run = run_id(Path(run_dir))
        note = partial(note_saved, Path(run_dir))
        self._newest = OrbaxWriter(StepDir(folder, run), keep or 1, every, sealed=note)
        self._best = OrbaxWriter(StepDir(folder / BEST, run), 1, kind=BEST, sealed=note)
        self._aside = [StepDir(folder / ASIDE, run), StepDir(folder / ASIDE / BEST, run)]
        self._seals = keep is not None
        self._thorough = thorough
        self._shared: SharedReading | None = None
        if keep is not None:
            # Whoever writes has a folder that all processes share; readers may have a copy each.
            self._shared = SharedReading([self._newest.step_dir, self._best.step_dir])
        self._reports_failure = False
        self.notes: list[str] = []
        """Sentences about steps that were skipped, sealed or set aside; only the leader has them."""
        if keep is not None and leader():
            self._newest.step_dir.clear()
            self._best.step_dir.clear()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Wait until everything is on disk."""
        try:
            self.wait()
        except SaveFailed:
            # Another error is the one to see: it is on its way, or was reported.
            if error is None and not self._reports_failure:
                raise
        finally:
            self._newest.close()
            self._best.close()

    def latest(self) -> int | None:
        """Return the newest saved step that has a seal, without checking that it is complete."""
        return max(self._newest.step_dir.sealed(), default=None)

    def describe_latest(self) -> str:
        """Return, in words, what to resume from after a failure.

        Waits for the saves in the background, and ignores those that fail now.
        """
        # A save that fails from now on is not the failure that is being reported.
        self._reports_failure = True
        for store in (self._newest, self._best):
            with suppress(SaveFailed):
                store.wait(alone=True)
        step = self.latest()
        if step is not None:
            return f"the last good checkpoint is that of step {step}"
        best = max(self._best.step_dir.sealed(), default=None)
        if best is not None:
            return f"the only good checkpoint is the best one, of step {best}"
        return "there is no checkpoint"

    def save(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Save `state` and the JSON-able `facts` as `step`; returns when the arrays may be changed again.

        Raises `SaveFailed`, as do `save_best`, `check` and `wait`.
        """
        self._newest.save(step, trees_of(state), facts)

    def save_best(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Save as the step with the best validation loss, in place of the previous one."""
        self._best.save(step, trees_of(state), facts)

    def check(self) -> None:
        """Raise `SaveFailed` now, not at the next save, if a save in the background has failed."""
        self._newest.check()
        self._best.check()

    def wait(self) -> None:
        """Wait until everything is on disk, and has its checksums."""
        self._newest.wait()
        self._best.wait()

    def find(self, which: str = LATEST, expected: Expected = None) -> Found:
        """Return the step to use for "latest", "best" or a number, read through and found complete.

        The latest is the newest that is complete. Where none of the newest is, the best is used, and the other way
        round. A step without checksums is read back: its arrays must be those of `expected()`, if that is given, and
        finite. Raises `RequestError` when there is none, or the one with that number is damaged.
        """
        stores = (self._newest, self._best)
        # The leader looks at the disk, and sends two numbers to the others: which store, and which step.
        found: Found | None = None

        def look() -> int:
            nonlocal found
            found = self._choose(which, expected)
            return stores.index(found.store)

        store = stores[agreed(look, self._shared.errands if self._shared else None)]
        step = from_leader(found.step if found else 0)
        return Found(store, step)

    def find_start(self, resume: str, expected: Expected = None) -> Found | None:
        """Return the step that a run resumes from: "auto" is the latest, or None to start from step 0; or a number.

        "never" is as "auto": `RunFolder.enter` has refused every folder that holds a run, so that none is found.
        A run that has ever committed a step never starts from the beginning by itself: `find` raises `RequestError`.
        """
        if resume not in ("auto", "never"):
            return self.find(resume, expected)
        # Steps that were set aside count too: the run has made progress that must not be overwritten silently.
        folders = (self._newest.step_dir, self._best.step_dir, *self._aside)
        committed = any(folder.steps() for folder in folders)
        if not from_leader(int(committed)):
            return None
        return self.find(LATEST, expected)

    def set_aside(self, after: int) -> None:
        """Move the steps after step `after` out of the way: they are damaged, or of a future that will not happen.

        The step `after` itself, which is there and complete, is not saved again.
        """
        self._newest.step = after or None
        if not leader():
            return
        folders = (self._newest.step_dir, self._best.step_dir)
        for folder, aside in zip(folders, self._aside, strict=True):
            later = [step for step in folder.steps() if step > after]
            for step in later:
                folder.move(step, aside)
            if later:
                steps = ", ".join(map(str, later))
                self.notes.append(f"step {steps} of {folder.folder} is moved to {aside.folder}")

    def has_best(self) -> bool:
        """Return whether a step with the best validation loss has a seal."""
        return bool(from_leader(int(bool(self._best.step_dir.sealed()))))

    def facts(self, found: Found) -> dict[str, Any]:
        """Return what a run saved beside the arrays. Raises `RequestError` where the step was not saved by a run."""
        folder = found.store.step_dir
        missing = folder.missing_run_facts(found.step)
        if missing:
            raise RequestError(
                f"checkpoint {folder.path(found.step)} was not saved by jaxdist.train: its facts have no "
                f"{', '.join(missing)}; name the folder of a run"
            )
        return folder.facts(found.step)

    def restore(self, abstract: TrainState, found: Found | None = None) -> TrainState:
        """Return the state of the step `found`, by default the latest, laid out as `abstract` says, on any mesh.

        `abstract` holds `jax.ShapeDtypeStruct`s with shardings. Fields that follow from the others are not saved:
        `Step.resume` computes them. Raises `RequestError` when there is no such step, or its arrays are others.
        """
        found = found or self.find()
        self._check_trained(found, abstract)
        self._check_optimizer(found, abstract)
        abstract = _with_what_is_saved(abstract, found.store.shapes(found.step, "training"))
        wanted = trees_of(_of_replicas(abstract, self.replicas_of(found)))
        residual = wanted.pop(RESIDUAL, None)
        rounded_by = self.rounded_by(found)
        if rounded_by:
            # The residual is read as it was saved: `Step.resume` deals it out.
            wanted[RESIDUAL] = residual_of(rounded_by, residual, abstract.params)
        trees = found.store.restore(found.step, wanted)
        training = trees.pop("training")
        params = trees.pop("params")
        variables = trees.pop("variables", {})
        return TrainState(params=params, variables=variables, crossing=trees, **training)

    def _check_trained(self, found: Found, abstract: TrainState) -> None:
        """Raise `RequestError` for a step of the same parameters, of which others are trained."""
        trained_there = set(found.store.shapes(found.step, "params"))
        training = found.store.shapes(found.step, "training")
        frozen_there = {name.removeprefix(FROZEN) for name in training if name.startswith(FROZEN)}
        trained_here = set(array_shapes(abstract.params))
        if trained_there == trained_here:
            return
        if trained_there | frozen_there != trained_here | set(array_shapes(abstract.frozen)):
            # Parameters of another model are named when they are read.
            return
        first = min(trained_there ^ trained_here)
        there, here = ("trained", "frozen") if first in trained_there else ("frozen", "trained")
        raise RequestError(
            f"checkpoint {found.store.step_dir.path(found.step)} is of another choice of trained parameters: {first} "
            f"is {there} there and {here} here; give parallelize the same wrt"
        )

    def _check_optimizer(self, found: Found, abstract: TrainState) -> None:
        """Raise `RequestError` for a step whose optimizer state has other arrays."""
        if set(array_shapes(abstract.params)) - set(found.store.shapes(found.step, "params")):
            # Parameters of another model are named when they are read.
            return
        training = found.store.shapes(found.step, "training")
        there = {name for name in training if name.startswith(OPTIMIZER)}
        here = set(array_shapes({OPTIMIZER.rstrip("."): abstract.optimizer}))
        if there == here:
            return
        first = min(there ^ here)
        which = "there and not here" if first in there else "here and not there"
        raise RequestError(
            f"checkpoint {found.store.step_dir.path(found.step)} was saved with another optimizer: its state holds "
            f"{len(there)} arrays and {len(here)} here, {first} {which}; give the same optimizer, or begin anew"
        )

    def replicas_of(self, found: Found) -> int:
        """Return how many replicas have saved moments of their own in a step; 0 where all had the same."""
        shape = found.store.shapes(found.step, "training")["skipped"]
        return shape[0] if shape else 0

    def rounded_by(self, found: Found) -> int:
        """Return of how many replicas a step holds the residual of compression; 0 where it holds none."""
        return max((shape[-1] for shape in found.store.shapes(found.step, RESIDUAL).values()), default=0)

    def restore_params(self, abstract: Params, variables: Params, found: Found) -> tuple[Params, Params]:
        """Return (parameters, variables) alone, for evaluation: the optimizer state is not read.

        Raises `RequestError` where processes have other copies of the step.
        """
        self.check_copies(found)
        trees = {"params": abstract}
        if variables:
            trees["variables"] = variables
        restored = found.store.restore(found.step, trees)
        return restored["params"], restored.get("variables", {})

    def check_copies(self, found: Found) -> None:
        """Raise `RequestError` where processes have other copies of a step.

        A run that resumes does without: its folder is known to be shared (`cluster.preflight`).
        """
        step_dir = found.store.step_dir
        check_weights(step_dir.folder, step_dir.files(found.step))

    def arrays(self, found: Found, item: str) -> Mapping[str, StoredArray]:
        """Return the arrays of one item of a step, such as `params`, by name, unread; none where it holds none."""
        return open_arrays(found.store.step_dir.path(found.step) / item)

    def _choose(self, which: str, expected: Expected) -> Found:
        """Return the step for `which`; the leader alone calls this. Raises `RequestError`."""
        stores = (self._newest, self._best)
        if which == BEST:
            stores = (self._best, self._newest)
        notes_before = len(self.notes)
        for store in stores:
            step = self._usable(store.step_dir, which, expected)
            if step is None:
                continue
            if which == BEST and store is self._newest:
                self.notes.append(f"no best checkpoint is complete; the newest one, of step {step}, is used instead")
            if which == LATEST and store is self._best:
                self.notes.append(f"no newest checkpoint is complete; the best one, of step {step}, is used instead")
            return Found(store, step)
        raise self._no_checkpoint(self.notes[notes_before:])

    def _usable(self, folder: StepDir, which: str, expected: Expected) -> int | None:
        """Return the newest complete step, or the one with the number `which`; note the damaged ones."""
        steps = folder.steps()
        if which not in (LATEST, BEST):
            return self._with_number(folder, which, steps, expected)
        for step in reversed(steps):
            damage = self._damage(folder, step, expected)
            if damage is None:
                return step
            self.notes.append(f"checkpoint {folder.path(step)} is damaged and skipped: {damage}")
        return None

    def _with_number(self, folder: StepDir, number: str, steps: list[int], expected: Expected) -> int:
        """Return the step with that number. Raises `RequestError` where it is not there, or is damaged."""
        if not STEP.fullmatch(number) or int(number) not in steps:
            there = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
            raise RequestError(f"{folder.folder} holds no step {number}; {there}")
        step = int(number)
        damage = self._damage(folder, step, expected)
        if damage:
            raise RequestError(f"checkpoint {folder.path(step)} is damaged: {damage}; choose another")
        return step

    def _damage(self, folder: StepDir, step: int, expected: Expected) -> str | None:
        """Return why a step cannot be used; None if it can. Seals a step that has no seal, if this may write."""
        seal = folder.seal_of(step)
        if seal is None:
            return self._damage_without_seal(folder, step, expected)
        damage = folder.damage(step, self._thorough, self._shared.differing if self._shared else None)
        if damage is None and seal.step is None:
            self.notes.append(f"checkpoint {folder.path(step)} has checksums of an older jaxdist, without run and step")
        return damage

    def _damage_without_seal(self, folder: StepDir, step: int, expected: Expected) -> str | None:
        shapes: dict[str, Shapes] | None = None
        if expected is not None:
            state = expected()
            shapes = {item: array_shapes(tree) for item, tree in trees_of(state).items()}
            # Their number of replicas may be another.
            for item in (RESIDUAL, "training") if state.skipped.ndim else (RESIDUAL,):
                if item in shapes:
                    shapes[item] = dict.fromkeys(shapes[item])
        # Facts first: they are small, and their damage needs no reading of the arrays.
        damage = folder.wrong_facts(step) or unreadable(folder.path(step), shapes, values=True)
        if damage:
            return f"{UNSEALED}, and read back {damage}"
        done = "it was read back and is complete"
        if self._seals:
            try:
                folder.seal(step)
                done += "; they are made now"
            except OSError as error:
                done += f"; they cannot be written ({error.strerror})"
        self.notes.append(f"checkpoint {folder.path(step)} had no checksums: {done}")
        return None

    def _no_checkpoint(self, damaged: list[str]) -> RequestError:
        """Return the error where no step can be used; `damaged` has a sentence for each that is there."""
        folder = self._newest.step_dir.folder
        aside = sorted({step for aside in self._aside for step in aside.steps()})
        if damaged:
            reason = f"no checkpoint in {folder} is complete: {'; '.join(damaged)}"
        elif aside:
            reason = f"the checkpoints in {folder} are all set aside (step {', '.join(map(str, aside))})"
        else:
            return RequestError(f"{folder} holds no checkpoint; train first, or name another run folder")
        return RequestError(
            f"{reason}; copy the missing files back, or name another run folder, or move {folder.parent} away to "
            f"start from the beginning"
        )


def _of_replicas(abstract: TrainState, saved: int) -> TrainState:
    """Return `abstract` with the shapes that a number of replicas has saved; their moments are read as they lie."""
    if saved in (0, *abstract.skipped.shape):
        return abstract
    own = abstract.optimizer, abstract.skipped, abstract.skipped_in_a_row
    optimizer, skipped, in_a_row = replicas.of_others(own, saved)
    return abstract._replace(optimizer=optimizer, skipped=skipped, skipped_in_a_row=in_a_row)


def _with_what_is_saved(abstract: TrainState, saved: Mapping[str, Any]) -> TrainState:
    """Return `abstract` with the scale of the loss, and the recent updates, that a step has `saved`, and no others.

    `Step.resume` makes, or drops, the rest.
    """
    scalar = abstract.step

    def like(state: Any) -> Any:
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=scalar.sharding), state)

    parts = {name.partition(".")[0] for name in saved}
    return abstract._replace(
        loss_scale=like(jax.eval_shape(first)) if LOSS_SCALE in parts else None,
        recent=like(jax.eval_shape(none_yet)) if RECENT in parts else None,
    )


def residual_of(replicas: int, mine: Params | None, params: Params) -> Params:
    """Return shapes and shardings for the residual of `replicas` of a run with `params`, whose own is `mine`."""
    if mine is not None and jax.tree.leaves(mine)[0].shape[-1] == replicas:
        return mine

    def of_all(w: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # The layout of a parameter leaves a further dim whole.
        return jax.ShapeDtypeStruct((*w.shape, replicas), jnp.float32, sharding=w.sharding)

    return jax.tree.map(of_all, params)


def trees_of(state: TrainState) -> dict[str, Any]:
    """Return what a checkpoint saves of a state: parameters and variables can be read without the rest."""
    training = state._asdict()
    # Both follow from the rest of the state.
    del training["weights"]
    del training["in_flight"]
    # Not even as an empty dict: Orbax would not read the steps of runs that did not know of it.
    if not training["frozen"]:
        del training["frozen"]
    for name in (LOSS_SCALE, RECENT):
        if training[name] is None:
            del training[name]
    variables = training.pop("variables")
    trees = {"params": training.pop("params"), **(training.pop("crossing") or {}), "training": training}
    if variables:
        trees["variables"] = variables
    return trees
