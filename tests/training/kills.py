"""Runs in a process of their own that dies without a word."""

import signal
import sys

import jax

from tests import forks

KILLED = """
import jax, os, pathlib, signal, sys, time
jax.config.update("jax_num_cpu_devices", {devices})
jax.config.update("jax_compilation_cache_dir", {cache!r})
jax.devices()  # as many as the tests have: then what they have compiled is not compiled again
from jaxdist.training.meter import Meter
step, saved = Meter.step, {saved!r} and pathlib.Path({saved!r})
def step_and_die(self, number, metrics):
    step(self, number, metrics)
    if number == {after} + 1:
        self.flush()
        while saved and not saved.exists():  # the save in the background is on disk, with its checksums
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
Meter.step = step_and_die
from jaxdist.train import main
main(sys.argv[1:])
"""


def kill_after(step: int, saved: int | None, argv: list[str]) -> None:
    """Run `train` with `argv` until `step` + 1 is done and `saved` is the newest checkpoint on disk, then kill it."""
    folder = next(option.partition("=")[2] for option in argv if option.startswith("--run-dir"))
    saved = saved and f"{folder}/checkpoints/sums/{saved}.json"
    shared = dict(devices=len(jax.devices()), cache=jax.config.jax_compilation_cache_dir)
    program = KILLED.format(after=step, saved=saved, **shared)
    done = forks.run([sys.executable, "-c", program, *argv])
    assert done.returncode == -signal.SIGKILL, done.stderr
