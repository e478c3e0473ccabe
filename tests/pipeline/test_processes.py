"""A pipeline across processes: the same numbers as in one, whether or not a step waits for the one before."""

import numpy as np
import pytest

from tests.processes import told

PROCESS = """
import numpy as np
from jaxdist.config import Config
from jaxdist.data.batches import global_batch
from jaxdist.training.run import Run
from tests.parity import cases
config = Config(
    mesh="2x2x2", precision="float32", model=dict(layers=4, embed=32, heads=4, vocab=96, sequence=16),
    parallel=dict(zero=1), pipeline=dict(microbatches=4), train=dict(global_batch_size=32, steps=40),
    optimizer=dict(warmup=0),
)
run, curve = Run(config, devices=jax.devices()), []
with jax.set_mesh(run.mesh):
    state, step = run.init(), run.compile()
    for number in range(40):
        tokens, labels = cases.rows(number)
        read = lambda rows: {"tokens": tokens[rows], "labels": labels[rows]}
        state, metrics = step(state, global_batch(np.arange(32), run.batch(), read))
        curve.append(metrics)
        if arguments == ["wait"]:
            jax.block_until_ready(state)
tell([[float(one.loss), float(one.grad_norm)] for one in curve])
"""


@pytest.mark.slow
def test_two_processes_have_the_curve_of_one():
    """The pipeline is the outermost axis: its two ranks are the two processes. 40 steps, each on rows of its own."""
    ways = ((1, "run on"), (2, "run on"), (2, "wait"))
    curves = [curve for processes, way in ways for curve in told(PROCESS, processes, way, seconds=300)]
    assert len(curves) == 5
    np.testing.assert_allclose(curves[1:], [curves[0]] * 4, rtol=1e-5)
