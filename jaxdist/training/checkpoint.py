"""The checkpoints of a run: its newest steps, and the one with the best validation loss; which of them to go on from.

A checkpoint knows no mesh: arrays are logical, layers stacked as [L, ...], parameters f32. The position in the data
is the step, because the order of the data is a function of (seed, step).

    checkpoints/STEP, sums/STEP.json    the newest, and those that are kept for good
    checkpoints/best/                   the same, of one step
    checkpoints/aside/                  what a run has gone back behind: damaged, or not wanted any more
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from jaxdist.cluster.agreement import agreed, from_leader, leader
from jaxdist.config import RequestError
from jaxdist.models import Params
from jaxdist.training.shelf import Shelf
from jaxdist.training.step import TrainState
from jaxdist.training.store import SaveFailed, Store

LATEST, BEST, ASIDE = "latest", "best", "aside"


class Found(NamedTuple):
    """A step that was whole when it was found."""

    store: Store
    step: int


class Checkpoints:
    """The folder `checkpoints/` of a run; saves in the background. Use it as a context manager.

    `keep` is how many of the newest steps to keep, beside those that `every` divides (0: none); None only reads, and
    changes nothing on disk. Every process of a run calls every method; the first one looks, and all do as it says.
    """

    def __init__(self, run_dir: Path, keep: int | None, every: int = 0):
        folder = Path(run_dir).resolve() / "checkpoints"
        self._newest = Store(folder, keep or 1, every)
        self._best = Store(folder / BEST, 1)
        self._aside = Shelf(folder / ASIDE)
        self.notes: list[str] = []
        """Sentences about steps that were passed over, set aside or removed; only the leader has them."""
        if keep is not None and leader():
            for store in (self._newest, self._best):
                path = store.shelf.path
                self.notes += [f"{path(step)} was not saved whole and is removed" for step in store.shelf.clear()]

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
        """What to go on from after a failure, in words. Waits for what is on its way; what fails now is not told."""
        for store in (self._newest, self._best):
            with suppress(SaveFailed):
                store.wait()
        step = self.latest()
        return "there is no checkpoint" if step is None else f"the last good checkpoint is that of step {step}"

    def save(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Save `state` and the JSON-able `facts` as `step`; returns when the arrays may be changed again.

        Raises `SaveFailed`, as do `save_best`, `check` and `wait`.
        """
        self._newest.save(step, _trees(state), facts)

    def save_best(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Save as the step with the best validation loss, in place of the one before."""
        self._best.save(step, _trees(state), facts)

    def check(self) -> None:
        """Tell of a save in the background that has failed: now, not at the next save."""
        self._newest.check()
        self._best.check()

    def wait(self) -> None:
        """Until everything is on disk, and has its checksums."""
        self._newest.wait()
        self._best.wait()

    def find(self, which: str = LATEST) -> Found:
        """The step to use for "latest", "best" or a number, read through and found whole.

        The latest is the newest that is whole; for the best that is damaged it stands in.
        Raises `RequestError` when there is none, or the one with that number is damaged.
        """
        stores = self._newest, self._best

        def look() -> int:
            before = len(self.notes)
            for store in reversed(stores) if which == BEST else stores[:1]:
                step = _whole(store.shelf, which, self.notes)
                if step is not None:
                    if which == BEST and store is self._newest:
                        self.notes.append(f"no best checkpoint is whole; the newest one, of step {step}, stands in")
                    return 2 * step + (store is self._best)
            raise _no_checkpoint(self._newest.shelf.folder, self.notes[before:])

        found = agreed(look)
        return Found(stores[found % 2], found // 2)

    def find_start(self, resume: str) -> Found | None:
        """The step that a run goes on from: "auto" is the latest, or None to start from the beginning; or a number."""
        if resume == "auto" and not from_leader(int(self.latest() is not None)):
            return None
        return self.find(LATEST if resume == "auto" else resume)

    def set_aside(self, after: int) -> None:
        """Move the steps after that one out of the way: they are damaged, or of a future that is not going to be.

        The step itself, which is there and whole, is not saved again.
        """
        self._newest.step = after or None
        if not leader():
            return
        for shelf in (self._newest.shelf, self._best.shelf):
            later = [step for step in shelf.steps() if step > after]
            for step in later:
                shelf.move(step, self._aside)
            if later:
                steps = ", ".join(map(str, later))
                self.notes.append(f"step {steps} of {shelf.folder} is moved to {self._aside.folder}")

    def has_best(self) -> bool:
        """Whether there is one with the best validation loss, as it seems."""
        return bool(from_leader(int(bool(self._best.shelf.sealed()))))

    def facts(self, found: Found) -> dict[str, Any]:
        """What was saved beside the arrays."""
        return found.store.shelf.facts(found.step)

    def restore(self, abstract: TrainState, found: Found | None = None) -> TrainState:
        """The state of the step `found`, by default the latest, laid out as `abstract` says: any mesh will do.

        `abstract` holds `jax.ShapeDtypeStruct`s with shardings. What follows from the rest is not saved: `Step.resume`
        makes it. Raises `RequestError` when there is no such step, or its arrays are others.
        """
        found = found or self.find()
        trees = found.store.restore(found.step, _trees(abstract))
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


def _no_checkpoint(folder: Path, damaged: list[str]) -> RequestError:
    if not damaged:
        return RequestError(f"{folder} holds no checkpoint; train first, or name another run folder")
    return RequestError(f"no checkpoint in {folder} is whole: {'; '.join(damaged)}; name another run folder")


def _whole(shelf: Shelf, which: str, notes: list[str]) -> int | None:
    """The newest step that is whole, or the one with the number `which`; `notes` get those that are not."""
    steps = shelf.steps()
    if which not in (LATEST, BEST):
        if not which.isdigit() or int(which) not in steps:
            there = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
            raise RequestError(f"{shelf.folder} holds no step {which}; {there}")
        if damage := shelf.damage(int(which)):
            raise RequestError(f"checkpoint {shelf.path(int(which))} is damaged: {damage}; choose another")
        return int(which)
    for step in reversed(steps):
        if not (damage := shelf.damage(step)):
            return step
        notes.append(f"checkpoint {shelf.path(step)} is damaged and passed over: {damage}")
    return None


def _trees(state: TrainState) -> dict[str, Any]:
    """Parameters and variables apart from the rest, so that they can be read alone; the rest follows from them."""
    training = state._asdict()
    del training["weights"], training["in_flight"]
    variables = training.pop("variables")
    return {"params": training.pop("params"), "training": training} | ({"variables": variables} if variables else {})
