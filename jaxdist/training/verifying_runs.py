"""Compare the first step of a run with that of the same run on one device: `python -m jaxdist.train --verify`."""

from __future__ import annotations

from functools import partial

import jax

from jaxdist.cluster.consensus import check_alike, leader_first
from jaxdist.cluster.heartbeat import COMPILING, READING
from jaxdist.cluster.job import Job
from jaxdist.cluster.runtime import check_computes
from jaxdist.config import Config, RequestError
from jaxdist.mesh import REPLICA
from jaxdist.mesh.crossing import EXACT
from jaxdist.mesh.split import Split
from jaxdist.request import to_toml
from jaxdist.training.copies import check_named
from jaxdist.training.forward.step import TrainState
from jaxdist.training.reference import refer
from jaxdist.training.run import Run
from jaxdist.training.starting import initial_weights
from jaxdist.training.task_text import PreferenceTask
from jaxdist.training.verifying import Side, Verification, one_device, verify
from jaxdist.weights.base import base_for
from jaxdist.weights.source import source_of

ROUNDED = "{dtype} rounds, and may send tokens to other experts: --precision float32 is compared to 1e-4"


def verify_run(run: Run, job: Job) -> Verification:
    """Compare the first step of `run` with the same step on one device; all processes call this.

    Both begin with the same weights: new ones, or those of `init_from`. Raises `RequestError` where the run has no
    step that one device could take.
    """
    check_alike("configuration", to_toml(run.config), "give all processes the same options")
    check_computes(run.mesh)
    check_named(run.config)
    run = Run(comparable(run.split), mesh=run.mesh)
    job.note(READING)
    leader_first("tokens", run.open_data)
    with jax.set_mesh(run.mesh):
        refer(run, partial(initial_weights, run), note=partial(job.note, READING))
    job.note(COMPILING)
    # As far as the memory of activations is predicted; the state on the mesh is there too.
    alone = run_on_one_device(run, run.engine.first_device)
    needed = alone.predicted_memory.total + run.predicted_memory.total
    device = one_device(run.engine, needed)
    if device != run.engine.first_device:
        alone = run_on_one_device(run, device)
    return verify(
        Side(run.engine, partial(run.task.batch_after, 0)),
        Side(alone.engine, partial(alone.task.batch_after, 0)),
        run.dtype,
        begin=partial(begin, run) if run.config.init_from else None,
        hint=ROUNDED.format(dtype=run.dtype) if run.config.numbers.casts else "",
    )


def comparable(split: Split) -> Config:
    """Return the configuration whose gradients cross the replicas exactly and at once, as one device adds them up.

    Raises `RequestError` for PipeDream, and for fp8.
    """
    if split.config.numbers.float8:
        raise RequestError(
            f"precision is {split.config.precision}, where the last bit of bfloat16 may send a number to the next one "
            f"of fp8, which is as much as a fault; verify with precision bfloat16, which sends the same"
        )
    if not split.flush:
        raise RequestError(
            "pipeline.schedule is pipedream, whose stages use weights of different steps, so that no step of it is one "
            "of one device; set it to 1f1b to verify the rest"
        )
    return split.config.with_knobs(EXACT)


def left_out(run: Run) -> list[str]:
    """Return a sentence where the loss of `run` is not that of one device, because of what crosses the replicas."""
    reason = run.split.crossing_traits.not_of_one_device(run.split.size(REPLICA))
    return [f"{reason}; compared is the exact gradient, and the update by it"] if reason else []


def run_on_one_device(run: Run, device: jax.Device) -> Run:
    """Return the same run on `device`, with the data that are open.

    A micro-batch has the rows that one device of the mesh has at once, so that it takes no more memory there. Networks
    for images take the statistics of batch norm from the rows of a micro-batch: they keep those of the mesh.
    """
    split = run.split
    images = run.config.model.images
    k = split.micro_batches if images else split.micro_batches * split.ranks
    knobs = {"mesh": "1x1x1", "parallel.zero": 0, "parallel.sequence": False, "train.accumulation": k}
    alone = Run(run.config.with_knobs(knobs), devices=[device])
    alone.task.data = run.task.data
    if isinstance(run.task, PreferenceTask) and isinstance(alone.task, PreferenceTask):
        alone.task.reference = run.task.reference
    return alone


def begin(run: Run) -> TrainState:
    """Return the state before the first step with the weights of `init_from`; call under `jax.set_mesh`."""
    config = run.config
    return base_for(config, None).begin(run, source_of(config.init_from), lambda line: None)
