"""What stands beside the parameters in the checkpoints of a run: nothing, or the frozen base of its adapters (LoRA).

A checkpoint of a LoRA run holds the adapters, and of the base its path and a digest: XXH3 of every file with weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxdist.cluster.consensus import agreed
from jaxdist.config import Config, ModelConfig, RequestError
from jaxdist.files.json_files import is_unicode
from jaxdist.huggingface.merging import merged
from jaxdist.huggingface.readable import Readable
from jaxdist.models import Model, Params, build
from jaxdist.parallel.partial_trees import joined
from jaxdist.sharding import named
from jaxdist.training.checkpoint.step_dir import BASE_FACT
from jaxdist.training.forward.step import TrainState
from jaxdist.weights.quantized_base import Holding, as_held, quantized_dims
from jaxdist.weights.source import Source, stored_at

if TYPE_CHECKING:
    from jaxdist.training.run import Run

BASE = "base"
"""The fact of a checkpoint that names the base."""


class NoBase:
    """The checkpoints of a run hold all of its parameters: nothing stands beside them."""

    def facts(self) -> dict[str, object]:
        """Return what a checkpoint keeps of it: nothing."""
        return {}

    def begin(self, run: Run, source: Source, say: Callable[[str], None]) -> TrainState:
        """Return the state before the first step, with the weights of `source`."""
        return source.begin(run, say)

    def resume(self, run: Run, state: TrainState, say: Callable[[str], None]) -> TrainState:
        """Return `state`, which is all of a checkpoint."""
        return state

    def joined(self, run: Run, params: Params) -> Params:
        """Return `params`, which are all of a checkpoint."""
        return params

    @contextmanager
    def merged(self, model: ModelConfig, stored: Mapping[str, Readable]) -> Iterator[Mapping[str, Readable]]:
        """Yield the parameters in a checkpoint as they are."""
        yield stored


class Base(NamedTuple):
    """The weights beside which adapters are trained."""

    path: Path
    """The folder of Hugging Face, or of a step of a run."""
    digest: str

    def facts(self) -> dict[str, object]:
        """Return what a checkpoint keeps of it."""
        return {BASE: {"path": str(self.path), "digest": self.digest}}

    def begin(self, run: Run, source: Source, say: Callable[[str], None]) -> TrainState:
        """Return the state before the first step, with the adapters of `source`, or new ones, beside the base.

        Call under `jax.set_mesh`.
        """
        trained = source.trained(run)
        beside = "new adapters" if trained is None else f"the adapters of {run.config.init_from}"
        say(f"weights     from {self.path}, frozen beside {beside}; their digest is {self.digest}")
        return run.engine.begin_beside(self.read(run, say), trained)

    def resume(self, run: Run, state: TrainState, say: Callable[[str], None]) -> TrainState:
        """Return the `state` of a checkpoint with the base; call under `jax.set_mesh`."""
        say(f"weights     from {self.path}, frozen beside the adapters of step {int(state.step)}")
        return state._replace(frozen=self.read(run, say))

    def joined(self, run: Run, params: Params) -> Params:
        """Return the base and the adapters of a checkpoint as one tree; call under `jax.set_mesh`."""
        return joined(self.read(run), params)

    @contextmanager
    def merged(self, model: ModelConfig, stored: Mapping[str, Readable]) -> Iterator[Mapping[str, Readable]]:
        """Yield the parameters of the base, with the adapters of a checkpoint merged in, unread, on one machine."""
        built = build(model)
        assert isinstance(built, Model)
        dtypes = {name: np.dtype(leaf.dtype) for name, leaf in named(built.as_read.abstract).items()}
        # Quantized weights are rounded to their dtype before that.
        dtypes |= dict.fromkeys(quantized_dims(model), np.dtype(np.float32))
        with stored_at(self.path).arrays(model) as arrays:
            frozen = {name: as_held(model, name, array) for name, array in arrays.items()}
            yield merged(model, frozen, stored, dtypes)

    def read(self, run: Run, say: Callable[[str], None] = lambda line: None) -> Params:
        """Return the frozen parameters, as a checkpoint has them; call under `jax.set_mesh`.

        `say` hears how far off they are where they are quantized.
        """
        holding = Holding(run)
        frozen = stored_at(self.path).frozen(holding)
        if report := holding.report():
            say(f"base        {report}")
        return frozen


def base_of(init_from: Path) -> Base:
    """Return the base that a run begins with; all processes call this, and the leader reads the files.

    Raises `RequestError` where there is none.
    """
    path = Path(os.path.abspath(init_from))
    if not is_unicode(str(path)):
        raise RequestError(f"'{path}' is not UTF-8, and a checkpoint of a LoRA run names its base; rename the folder")
    return Base(*stored_at(path).lasting())


def base_for(config: Config, facts: Mapping[str, Any] | None, resumes: bool = False) -> Base | NoBase:
    """Return what stands beside the parameters that a run saves. All processes call this.

    `facts` come from the checkpoint with its adapters, beside which no other base will do; None for a new run. A run
    that `resumes` may name by `init_from` where its base is now; other commands look there if the base is not where it
    was. Raises `RequestError` for another base, or where it is missing.
    """
    if not config.model.frozen:
        return NoBase()
    assert config.init_from, "a check has refused a LoRA run without a base"
    if facts is None:
        return base_of(config.init_from)
    recorded = recorded_base(config, facts)
    named = Path(os.path.abspath(config.init_from))
    where = _where(recorded.path, named, resumes)
    trained = f"the adapters were trained beside {recorded.path} of digest {recorded.digest}"
    remedy = (
        f"put the same weights back there, or resume the run with --init-from and their new place (or write it as "
        f"init_from into {config.folder / 'config.toml'})"
    )
    if not agreed(lambda: int(where.exists())):
        raise RequestError(f"{trained}, but there is nothing at {where}; {remedy}")
    found = base_of(where)
    if found.digest != recorded.digest:
        raise RequestError(f"{trained}, but {where} has digest {found.digest}; {remedy}")
    return found


def recorded_base(config: Config, facts: Mapping[str, Any]) -> Base:
    """Return the base that a checkpoint names. Raises `RequestError` where it names none."""
    fact: Any = facts.get(BASE)
    if not BASE_FACT.holds(fact):
        raise RequestError(
            f"step {facts['step']} of {config.folder} does not say beside which weights its adapters were trained, as "
            f"{config.model.frozen_by} needs; choose another step, or name another run folder"
        )
    return Base(Path(fact["path"]), fact["digest"])


def _where(recorded: Path, named: Path, resumes: bool) -> Path:
    """Return where to look for the base: it was `recorded` there, and `init_from` is `named` now."""
    if resumes:
        # A run is named as a whole, and its latest step is another after it has gone on.
        return recorded if recorded.parent == named / "checkpoints" else named
    moved = agreed(lambda: int(named.exists() and not recorded.exists()))
    return named if moved else recorded
