"""What a process takes while it restores, on a state of a few hundred megabytes."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.training.checkpoint.manager import Checkpoints
from jaxdist.training.forward.step import TrainState

PROGRAM = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from tests.training.test_restore_memory import abstract
from jaxdist.training.checkpoint.manager import Checkpoints

status = lambda name: next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
with Checkpoints(Path(sys.argv[1]), keep=None) as checkpoints:
    found, like = checkpoints.find(), abstract()
    before = status("VmRSS:")
    state = jax.block_until_ready(checkpoints.restore(like, found))
print("took", sum(leaf.nbytes for leaf in jax.tree.leaves(state)), max(status("VmHWM:"), status("VmRSS:")) - before)
"""


def abstract() -> TrainState:
    """256 MiB: parameters and their momentum, 16 arrays each."""
    there = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = lambda shape, dtype=jnp.float32: jax.ShapeDtypeStruct(shape, dtype, sharding=there)
    arrays = lambda: {f"w{i}": like((2, 1024, 1024)) for i in range(16)}
    count = like((), jnp.int32)
    return TrainState(count, arrays(), (arrays(),), count, count, variables={})


@pytest.mark.slow
def test_restoring_takes_no_more_than_half_as_much_again_and_a_gibibyte(tmp_path):
    rng = np.random.default_rng(0)
    noise = lambda a: jnp.asarray(rng.standard_normal(a.shape, np.float32).astype(a.dtype))
    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, jax.tree.map(noise, abstract()), {"step": 1})
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True)
    own, peak = map(int, done.stdout.split("took")[1].split())
    assert own >= 256 * 2**20
    assert own <= peak < 1.5 * own + 2**30
