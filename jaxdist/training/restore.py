"""The weights of a run's checkpoint, on a mesh of today: for evaluation, generation and other uses without training."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxdist.cluster.runtime import check_computes
from jaxdist.config import Config
from jaxdist.models import Params
from jaxdist.training.run import Run
from jaxdist.weights.base import base_for
from jaxdist.weights.source import stored_at


class Trained(NamedTuple):
    """The weights of a run's checkpoint, and the run that they belong to."""

    run: Run
    step: int | None
    """None for the weights of a folder of Hugging Face."""
    params: Params
    variables: Params
    data: str | None
    """Fingerprint of the data that they were trained on; None where it is not known."""


def restore(
    config: Config, which: str, batch: bool = True, check: Callable[[Run], object] = lambda run: None
) -> Trained:
    """Return the parameters of step `which` ("latest", "best" or a number) of the run in `config.run_dir`.

    They are the weights themselves where that is a folder of Hugging Face, which has no steps. `check` gets the run
    before any weight is read.
    """
    source = stored_at(config.folder)
    source.check_step(which)
    # The optimizer state, which may rest in the host's memory, is not read.
    run = Run(config.with_knobs({"parallel.offload": "none"}), batch=batch)
    check_computes(run.mesh)
    check(run)
    with jax.set_mesh(run.mesh):
        found = source.restore(run, which)
        base = base_for(run.config, found.facts)
        params = run.step.folded(base.joined(run, found.params))
        return Trained(run, found.step, params, found.variables, found.facts.get("data"))
