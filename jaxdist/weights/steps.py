"""The weights in a step of a run: to begin another run with, as the base of adapters, and for use without training."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxdist.config import RequestError
from jaxdist.huggingface.readable import Readable
from jaxdist.models import Params
from jaxdist.training.checkpoint.finite_state import check_loaded
from jaxdist.training.checkpoint.manager import BEST, Checkpoints, Found
from jaxdist.training.forward.step import TrainState
from jaxdist.weights import upcycling
from jaxdist.weights.digests import digest_of
from jaxdist.weights.inheriting import checkpoint_of

if TYPE_CHECKING:
    from jaxdist.training.run import Run
    from jaxdist.weights.quantized_base import Holding


def begin(run: Run, path: Path, say: Callable[[str], None]) -> TrainState:
    """Return the state before the first step of `run` with these weights, which may be those of a dense run."""
    folder, which = checkpoint_of(path)
    growth = upcycling.growth(run, folder.own_config().model)
    with Checkpoints(folder.path, keep=None) as checkpoints:
        found = checkpoints.find(which)
        abstract = run.engine.abstract_logical()
        params, variables = checkpoints.restore_params(growth.shapes(abstract.params), abstract.variables, found)
    check_loaded(params, f"step {found.step} of {folder.path}", "name another checkpoint as --init-from")
    for note in checkpoints.notes:
        say(note)
    params = growth.grown(params)
    say(f"weights     from step {found.step} of {folder.path}{growth.remark}")
    return run.engine.begin(params, variables)


def restore(run: Run, path: Path, which: str) -> tuple[int, Params, Params, dict[str, Any]]:
    """Return the number, parameters, variables and facts of step `which` of the run at `path`."""
    with Checkpoints(path, keep=None) as checkpoints:
        found = checkpoints.find(which)
        for note in checkpoints.notes:
            print(f"note: {note}", file=sys.stderr)
        state = run.engine.abstract_logical()
        params, variables = checkpoints.restore_params(state.params, state.variables, found)
        check_loaded(params, f"step {found.step} of {path}", "name another one by --checkpoint")
        return found.step, params, variables, checkpoints.facts(found)


def lasting(path: Path) -> tuple[Path, str]:
    """Return the path of a step by its number, and a digest of its parameters. All processes call this."""
    run, which = checkpoint_of(path)
    with Checkpoints(run.path, keep=None) as checkpoints:
        found = checkpoints.find(which)
    # One stands in for the other where that is damaged.
    name = BEST if found.store.step_dir.folder.name == BEST else str(found.step)
    # The latest step of a run changes as it goes on.
    step = Path(os.path.abspath(run.path)) / "checkpoints" / name
    return step, digest_of(lambda: _checksums(found))


def frozen(holding: Holding, path: Path) -> Params:
    """Return the parameters of a step, frozen beside the adapters of a run, as it holds them.

    The step is one that `lasting` has found, which has read it through.
    """
    folder, which = checkpoint_of(path)
    with Checkpoints(folder.path, keep=None, thorough=False) as checkpoints:
        params, _ = checkpoints.restore_params(holding.to_read, {}, checkpoints.find(which))
    check_loaded(params, f"the base {path}", "name another step as --init-from, in a new run")
    return jax.tree.map_with_path(holding.hold, params)


@contextmanager
def arrays(path: Path) -> Iterator[Mapping[str, Readable]]:
    """Open the parameters of a step by name, unread, on one machine."""
    folder, which = checkpoint_of(path)
    with Checkpoints(folder.path, keep=None) as checkpoints:
        yield checkpoints.arrays(checkpoints.find(which), "params")


def _checksums(found: Found) -> dict[str, str]:
    """Return the checksums of the parameters in a step, which was read through when it was found.

    Raises `RequestError` where it has none.
    """
    seal = found.store.step_dir.seal_of(found.step)
    if seal is None:
        raise RequestError(
            f"{found.store.step_dir.path(found.step)} has no checksums, by which a LoRA run would know its base again; "
            f"begin with another step"
        )
    return {name: value for name, (_, value) in seal.files.items() if name.startswith("params/")}
