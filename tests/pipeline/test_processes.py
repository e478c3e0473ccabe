"""A pipeline across processes: the same numbers as in one, whether or not a step waits for the one before."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.test_parallelize import free_port

PROCESS = """
import json, sys, jax
process, processes, port, wait = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "wait"
jax.config.update("jax_num_cpu_devices", 8 // processes)
if processes > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process, heartbeat_timeout_seconds=10,
                               shutdown_timeout_seconds=15)
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
run, told = Run(config, devices=jax.devices()), []
with jax.set_mesh(run.mesh):
    state, step = run.init(), run.compile()
    for number in range(40):
        tokens, labels = cases.rows(number)
        read = lambda rows: {"tokens": tokens[rows], "labels": labels[rows]}
        state, metrics = step(state, global_batch(np.arange(32), run.batch(), read))
        told.append(metrics)
        if wait:
            jax.block_until_ready(state)
print("told " + json.dumps([[float(one.loss), float(one.grad_norm)] for one in told]), flush=True)
"""


@pytest.mark.slow
def test_two_processes_have_the_curve_of_one():
    """The pipeline is the outermost axis: its two ranks are the two processes. 40 steps, each on rows of its own."""
    curves = []
    for processes, wait in ((1, "run on"), (2, "run on"), (2, "wait")):
        arguments = [sys.executable, "-c", PROCESS]
        rest = [str(processes), free_port(), wait]
        running = [
            subprocess.Popen([*arguments, str(i), *rest], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE)
            for i in range(processes)
        ]
        try:
            said = [process.communicate(timeout=300)[0].decode() for process in running]
        finally:
            for process in running:
                process.kill()
        assert [process.returncode for process in running] == [0] * processes
        lines = [line for text in said for line in text.splitlines() if line.startswith("told ")]
        curves += [json.loads(line.removeprefix("told ")) for line in lines]
    assert len(curves) == 5
    np.testing.assert_allclose(curves[1:], [curves[0]] * 4, rtol=1e-5)
