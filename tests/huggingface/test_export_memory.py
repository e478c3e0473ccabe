"""What a process takes while it exports a run that is much larger than that."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.config import Config, ModelConfig
from jaxdist.request import to_toml
from tests.huggingface.exported import abstract, save

PROGRAM = """
import resource, sys
import jax
from jaxdist import checkpoints
from jaxdist.training import export

status = lambda name: next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))
run, out, limit = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit), int(limit)))
jax.config.update("jax_platforms", "cpu")
jax.devices()
before = status("VmRSS:")
assert checkpoints.main([run, f"--export={out}"]) == 0
print("took", status("VmHWM:") - before)
"""


def make(run: Path, model: ModelConfig) -> int:
    """A run that has saved random numbers as its weights; return their bytes."""
    noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    params = jax.tree.map(lambda leaf: jnp.asarray(np.resize(noise, leaf.shape)), abstract(model))
    save(run, params)
    (run / "config.toml").write_text(to_toml(Config(model=model, run_dir=run, precision="bfloat16")))
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def export(run: Path, out: str, limit: int = 0) -> int:
    """Export in a process that may have so many bytes of data, 0 for any number; return what it took."""
    command = [sys.executable, "-c", PROGRAM, str(run), str(out), str(limit)]
    # The tests ask XLA for 32 threads, whose stacks count as data.
    env = {name: value for name, value in os.environ.items() if name != "NPROC"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split("took")[1])


@pytest.mark.exhaustive
def test_an_export_takes_no_more_than_two_tensors_and_64_mib(tmp_path):
    model = ModelConfig(family="llama", layers=24, embed=512, heads=8, mlp=3072, vocab=1024, sequence=64)
    assert make(tmp_path / "run", model) >= 240 * 2**20
    largest = 512 * 3072
    assert export(tmp_path / "run", f"{tmp_path}/out/") <= 2 * 2 * largest + 64 * 2**20
    assert export(tmp_path / "run", f"{tmp_path}/out.safetensors") <= 2 * 4 * 2 * largest + 64 * 2**20


@pytest.mark.exhaustive
def test_a_run_of_a_gigabyte_is_exported_by_a_process_of_400_megabytes(tmp_path):
    model = ModelConfig(family="llama", layers=8, embed=2048, heads=16, kv_heads=4, mlp=4096, vocab=8192, sequence=64)
    assert make(tmp_path / "run", model) >= 10**9
    export(tmp_path / "run", f"{tmp_path}/out/", limit=400 * 2**20)
    export(tmp_path / "run", f"{tmp_path}/out.safetensors", limit=400 * 2**20)
