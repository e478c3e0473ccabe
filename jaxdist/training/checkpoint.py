"""Saving and restoring a run with Orbax: the newest few steps, and the one with the best validation loss.

A checkpoint knows no mesh: arrays are logical, layers stacked as [L, ...], parameters f32. The position in the data
is the step, because the order of the data is a function of (seed, step).
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from jaxdist.config import RequestError
from jaxdist.models import Params
from jaxdist.training.step import TrainState

BEST = "best"


class Checkpoints:
    """The folder `checkpoints/` of a run; saves in the background. Use it as a context manager, or `close` it.

    `keep` is how many of the newest steps to keep; None only reads, and changes nothing on disk.
    """

    def __init__(self, run_dir: Path, keep: int | None):
        logging.getLogger("absl").setLevel(logging.ERROR)
        folder = Path(run_dir).resolve() / "checkpoints"
        if keep is not None:
            for torn in folder.glob("**/*.orbax-checkpoint-tmp"):  # left by a process that died while it saved
                shutil.rmtree(torn, ignore_errors=True)
        self._newest = _manager(folder, keep)
        self._best = _manager(folder / BEST, keep and 1)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def latest(self) -> int | None:
        """The newest step that was saved whole."""
        return self._newest.latest_step()

    def save(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Save `state` and the JSON-able `facts` as `step`; returns when the arrays may be changed again."""
        if step != self.latest():
            self._newest.save(step, args=_contents(state, facts), force=True)

    def save_best(self, step: int, state: TrainState, facts: dict[str, Any]) -> None:
        """Save as the step with the best validation loss, in place of the one before."""
        if step != self._best.latest_step():
            self._best.save(step, args=_contents(state, facts), force=True)

    def check(self) -> None:
        """Raise the error of a save in the background that has failed: now, not at the next save."""
        self._newest.check_for_errors()
        self._best.check_for_errors()

    def facts(self, which: str = "latest") -> dict[str, Any]:
        return self._read(*self._find(which), facts=ocp.args.JsonRestore()).facts

    def restore(self, abstract: TrainState, which: str = "latest") -> TrainState:
        """The state of `which` step ("latest", "best" or a number), laid out as `abstract` says: any mesh will do.

        `abstract` holds `jax.ShapeDtypeStruct`s with shardings. Weights in use are not saved: `Run.resume` makes them.
        Raises `RequestError` when there is no such step.
        """
        items = {name: ocp.args.StandardRestore(tree) for name, tree in _items(abstract).items()}
        found = self._read(*self._find(which), **items)
        return TrainState(params=found.params, variables=found.get("variables", {}), **found.training)

    def restore_params(self, abstract: Params, variables: Params, which: str = "latest") -> tuple[int, Params, Params]:
        """(step, parameters, variables) alone, for evaluation: the optimizer's state is not read."""
        manager, step = self._find(which)
        trees = {"params": abstract} | ({"variables": variables} if variables else {})
        found = self._read(manager, step, **{name: ocp.args.StandardRestore(tree) for name, tree in trees.items()})
        return step, found.params, found.get("variables", {})

    def _read(self, manager: ocp.CheckpointManager, step: int, **items: Any) -> Any:
        try:
            return manager.restore(step, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises what its parts raise: ValueError, KeyError, JSONDecodeError ...
            reason = str(error).strip().partition("\n")[0][:200]
            raise RequestError(
                f"checkpoint {manager.directory}/{step} cannot be read into this run's model ({reason}); if it is "
                f"damaged, remove that folder to fall back on an older one"
            ) from error

    def _find(self, which: str) -> tuple[ocp.CheckpointManager, int]:
        manager = self._best if which == BEST else self._newest
        steps = sorted(manager.all_steps())
        if not steps:
            raise RequestError(f"{manager.directory} holds no checkpoint; train first, or name another run folder")
        if which in ("latest", BEST):
            return manager, steps[-1]
        if not which.isdigit() or int(which) not in steps:
            raise RequestError(f"{manager.directory} holds no step {which}; it has {', '.join(map(str, steps))}")
        return manager, int(which)

    def close(self) -> None:
        """Wait until everything is on disk."""
        for manager in (self._newest, self._best):
            manager.wait_until_finished()
            manager.close()


def _manager(folder: Path, keep: int | None) -> ocp.CheckpointManager:
    if keep is None:
        options = ocp.CheckpointManagerOptions(read_only=True, create=False)
    else:
        options = ocp.CheckpointManagerOptions(max_to_keep=keep)
    return ocp.CheckpointManager(folder, options=options)


def _items(state: TrainState) -> dict[str, Any]:
    """Parameters and variables apart from the rest, so that they can be read alone; weights in use follow from them."""
    training = state._asdict()
    del training["weights"]
    variables = training.pop("variables")
    return {"params": training.pop("params"), "training": training} | ({"variables": variables} if variables else {})


def _contents(state: TrainState, facts: dict[str, Any]) -> ocp.args.Composite:
    items = {name: ocp.args.StandardSave(tree) for name, tree in _items(state).items()}
    return ocp.args.Composite(facts=ocp.args.JsonSave(facts), **items)
