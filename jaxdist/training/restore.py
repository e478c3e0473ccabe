"""The weights of a run's checkpoint, on a mesh of today: for evaluation, generation and other uses without training."""

from __future__ import annotations

import sys
from typing import NamedTuple

import jax

from jaxdist.config import Config
from jaxdist.models import Params
from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder


class Trained(NamedTuple):
    """The weights of a run's checkpoint, and the run that they belong to."""

    run: Run
    step: int
    params: Params
    variables: Params
    data: str
    """Fingerprint of the data that they were trained on."""


def restore(config: Config, which: str, batch: bool = True) -> Trained:
    """Return the parameters of step `which` ("latest", "best" or a number) of the run in `config.run_dir`."""
    RunFolder(config.folder).check_layout()
    # The optimizer state, which may rest in the host's memory, is not read.
    without_offload = config.parallel.model_copy(update={"offload": "none"})
    run = Run(config.model_copy(update={"parallel": without_offload}), batch=batch)
    with jax.set_mesh(run.mesh), Checkpoints(config.folder, keep=None) as checkpoints:
        found = checkpoints.find(which)
        for note in checkpoints.notes:
            print(f"note: {note}", file=sys.stderr)
        state = run.abstract_logical()
        params, variables = checkpoints.restore_params(state.params, state.variables, found)
        data = checkpoints.facts(found)["data"]
        return Trained(run, found.step, run.step.folded(params), variables, data)
