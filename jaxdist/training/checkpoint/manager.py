"""The checkpoints of a run: its newest steps, and the one with the best validation loss; which of them to go on from.

A checkpoint knows no mesh: arrays are logical, layers stacked as [L, ...], parameters f32. The position in the data
is the step, because the order of the data is a function of (seed, step).

    checkpoints/STEP, sums/STEP.json    the newest, and those that are kept for good
    checkpoints/best/                   the same, of one step
    checkpoints/aside/, aside/best/     steps that the run went back behind: damaged, or not wanted any more
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.cluster.consensus import agreed, from_leader, leader
from jaxdist.config import RequestError
from jaxdist.models import Params
from jaxdist.training.checkpoint.orbax_writer import OrbaxWriter, SaveFailed, array_shapes
from jaxdist.training.checkpoint.readback import unreadable
from jaxdist.training.checkpoint.step_dir import STEP, UNSEALED, StepDir
from jaxdist.training.forward.step import TrainState
from jaxdist.training.run_dir import RunFolder

LATEST, BEST, ASIDE = "latest", "best", "aside"


class Found(NamedTuple):
    """A step that was whole when it was found."""

    store: OrbaxWriter
    step: int


class Checkpoints:
    """The folder `checkpoints/` of a run; saves in the background. Use it as a context manager.

    `keep` is how many of the newest steps to keep, beside those that `every` divides (0: none); None only reads, and
    changes nothing on disk. Every process of a run calls every method; the first one looks, and all do as it says.
    """

    def __init__(self, run_dir: Path, keep: int | None, every: int = 0):
        folder = Path(run_dir).resolve() / "checkpoints"
        run = RunFolder(run_dir).identity()
        self._newest = OrbaxWriter(StepDir(folder, run), keep or 1, every)
        self._best = OrbaxWriter(StepDir(folder / BEST, run), 1, kind=BEST)
        self._aside = [StepDir(folder / ASIDE, run), StepDir(folder / ASIDE / BEST, run)]
        self._seals = keep is not None
        self.notes: list[str] = []
        """Sentences about steps that were passed over, sealed or set aside; only the leader has them."""
        if keep is not None and leader():
            self._newest.shelf.clear()
            self._best.shelf.clear()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        """Wait until everything is on disk."""
        try:
            self.wait()
        except SaveFailed:
            if error is None:
                raise
        finally:
            self._newest.close()
            self._best.close()

    def latest(self) -> int | None:
        """The newest step that was saved, as it seems: nobody has looked whether it is whole."""
        return max(self._newest.shelf.sealed(), default=None)

    def told(self) -> str:
        """What to resume from after a failure, in words. Waits for what is on its way; what fails now is not told."""
        for store in (self._newest, self._best):
            with suppress(SaveFailed):
                store.wait()
        step, best = self.latest(), max(self._best.shelf.sealed(), default=None)
        if step is not None:
            return f"the last good checkpoint is that of step {step}"
        return "there is no checkpoint" if best is None else f"the only good checkpoint is the best one, of step {best}"

    def save(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Save `state` and the JSON-able `facts` as `step`; returns when the arrays may be changed again.

        Raises `SaveFailed`, as do `save_best`, `check` and `wait`.
        """
        self._newest.save(step, trees_of(state), facts)

    def save_best(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Save as the step with the best validation loss, in place of the one before."""
        self._best.save(step, trees_of(state), facts)

    def check(self) -> None:
        """Tell of a save in the background that has failed: now, not at the next save."""
        self._newest.check()
        self._best.check()

    def wait(self) -> None:
        """Until everything is on disk, and has its checksums."""
        self._newest.wait()
        self._best.wait()

    def find(self, which: str = LATEST, expected: Callable[[], TrainState] | None = None) -> Found:
        """The step to use for "latest", "best" or a number, read through and found whole.

        The latest is the newest that is whole. Where no newest is, the best stands in, and the other way round. A step
        without checksums is read back: its arrays must be those of `expected()`, if that is given, and finite.
        Raises `RequestError` when there is none, or the one with that number is damaged.
        """
        stores = self._newest, self._best

        def look() -> int:
            before = len(self.notes)
            for store in reversed(stores) if which == BEST else stores:
                step = self._usable(store.shelf, which, expected)
                if step is None:
                    continue
                if which == BEST and store is self._newest:
                    self.notes.append(f"no best checkpoint is whole; the newest one, of step {step}, stands in")
                if which == LATEST and store is self._best:
                    self.notes.append(f"no newest checkpoint is whole; the best one, of step {step}, stands in")
                return 2 * step + (store is self._best)
            raise self._no_checkpoint(self.notes[before:])

        found = agreed(look)
        return Found(stores[found % 2], found // 2)

    def find_start(self, resume: str, expected: Callable[[], TrainState] | None = None) -> Found | None:
        """The step that a run goes on from: "auto" is the latest, or None to start from the beginning; or a number.

        A run that has ever committed a step never starts from the beginning by itself: `find` raises `RequestError`.
        """
        shelves = self._newest.shelf, self._best.shelf, *self._aside
        if resume == "auto" and not from_leader(int(any(shelf.steps() for shelf in shelves))):
            return None
        return self.find(LATEST if resume == "auto" else resume, expected)

    def set_aside(self, after: int) -> None:
        """Move the steps after that one out of the way: they are damaged, or of a future that is not going to be.

        The step itself, which is there and whole, is not saved again.
        """
        self._newest.step = after or None
        if not leader():
            return
        for shelf, aside in zip((self._newest.shelf, self._best.shelf), self._aside, strict=True):
            later = [step for step in shelf.steps() if step > after]
            for step in later:
                shelf.move(step, aside)
            if later:
                steps = ", ".join(map(str, later))
                self.notes.append(f"step {steps} of {shelf.folder} is moved to {aside.folder}")

    def has_best(self) -> bool:
        """Whether there is one with the best validation loss, as it seems."""
        return bool(from_leader(int(bool(self._best.shelf.sealed()))))

    def facts(self, found: Found) -> dict[str, Any]:
        """What a run saved beside the arrays. Raises `RequestError` where the step was not saved by one."""
        shelf = found.store.shelf
        missing = shelf.missing_run_facts(found.step)
        if missing:
            raise RequestError(
                f"checkpoint {shelf.path(found.step)} was not saved by jaxdist.train: its facts have no "
                f"{', '.join(missing)}; name the folder of a run"
            )
        return shelf.facts(found.step)

    def restore(self, abstract: TrainState, found: Found | None = None) -> TrainState:
        """The state of the step `found`, by default the latest, laid out as `abstract` says: any mesh will do.

        `abstract` holds `jax.ShapeDtypeStruct`s with shardings. What follows from the rest is not saved: `Step.resume`
        makes it. Raises `RequestError` when there is no such step, or its arrays are others.
        """
        found = found or self.find()
        trees = found.store.restore(found.step, trees_of(abstract))
        training = trees.pop("training")
        return TrainState(params=trees["params"], variables=trees.get("variables", {}), **training)

    def restore_params(self, abstract: Params, variables: Params, found: Found) -> tuple[Params, Params]:
        """(parameters, variables) alone, for evaluation: the optimizer's state is not read."""
        trees = {"params": abstract} | ({"variables": variables} if variables else {})
        trees = found.store.restore(found.step, trees)
        return trees["params"], trees.get("variables", {})

    def arrays(self, found: Found, item: str) -> Any:
        """One item of a step, such as `params`, as it was saved, on one device; {} where it holds none."""
        return found.store.read(found.step, item)

    def _usable(self, shelf: StepDir, which: str, expected: Callable[[], TrainState] | None) -> int | None:
        """The newest step that is whole, or the one with the number `which`; the notes get those that are not."""
        steps = shelf.steps()
        if which not in (LATEST, BEST):
            if not STEP.fullmatch(which) or int(which) not in steps:
                there = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
                raise RequestError(f"{shelf.folder} holds no step {which}; {there}")
            if damage := self._damage(shelf, int(which), expected):
                raise RequestError(f"checkpoint {shelf.path(int(which))} is damaged: {damage}; choose another")
            return int(which)
        for step in reversed(steps):
            damage = self._damage(shelf, step, expected)
            if damage is None:
                return step
            self.notes.append(f"checkpoint {shelf.path(step)} is damaged and passed over: {damage}")
        return None

    def _damage(self, shelf: StepDir, step: int, expected: Callable[[], TrainState] | None) -> str | None:
        """Why a step cannot be used; None if it can. One without a seal gets one then, if this may write."""
        seal = shelf.seal_of(step)
        if seal is None:
            return self._damage_without_seal(shelf, step, expected)
        damage = shelf.damage(step)
        if damage is None and seal.step is None:
            self.notes.append(f"checkpoint {shelf.path(step)} has checksums of an older jaxdist, without run and step")
        return damage

    def _damage_without_seal(self, shelf: StepDir, step: int, expected: Callable[[], TrainState] | None) -> str | None:
        shapes = None
        if expected is not None:
            shapes = {item: array_shapes(tree) for item, tree in trees_of(expected()).items()}
        damage = shelf.wrong_facts(step) or unreadable(shelf.path(step), shapes, values=True)
        if damage:
            return f"{UNSEALED}, and read back {damage}"
        done = "it was read back and is whole"
        if self._seals:
            try:
                shelf.seal(step)
                done += "; they are made now"
            except OSError as error:
                done += f"; they cannot be written ({error.strerror})"
        self.notes.append(f"checkpoint {shelf.path(step)} had no checksums: {done}")
        return None

    def _no_checkpoint(self, damaged: list[str]) -> RequestError:
        """What to say where no step can be used; `damaged` has a sentence for each that is there."""
        folder = self._newest.shelf.folder
        aside = sorted({step for shelf in self._aside for step in shelf.steps()})
        if damaged:
            reason = f"no checkpoint in {folder} is whole: {'; '.join(damaged)}"
        elif aside:
            reason = f"the checkpoints in {folder} are all set aside (step {', '.join(map(str, aside))})"
        else:
            return RequestError(f"{folder} holds no checkpoint; train first, or name another run folder")
        return RequestError(
            f"{reason}; copy the missing files back, or name another run folder, or move {folder} away to start from "
            f"the beginning"
        )


def trees_of(state: TrainState) -> dict[str, Any]:
    """Parameters and variables apart from the rest, so that they can be read alone; the rest follows from them."""
    training = state._asdict()
    del training["weights"], training["in_flight"]
    variables = training.pop("variables")
    return {"params": training.pop("params"), "training": training} | ({"variables": variables} if variables else {})
