"""Copies of arrays on several devices: a flipped bit is found, with its device, and ends the run before it is saved."""

import re

import jax
import numpy as np
import pytest

from jaxdist.config import Config
from jaxdist.training import device_copies
from jaxdist.training.device_copies import DeviceCopies, Difference
from jaxdist.training.meter import Diverged
from jaxdist.training.run import Run
from jaxdist.training.step_runner import StepRunner


def flipped(array: jax.Array, device: int, bit: int = 25) -> jax.Array:
    """The array with one bit changed in what one device holds of it."""
    shards = [shard.data for shard in array.addressable_shards]
    a = np.array(shards[device])
    a.view(np.uint32).reshape(-1)[-1] ^= np.uint32(1 << bit)
    shards[device] = jax.device_put(a, array.addressable_shards[device].device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def setup(mesh: str, zero: int) -> tuple[Run, DeviceCopies]:
    model = dict(layers=1, embed=8, heads=2, vocab=32, sequence=8)
    run = Run(Config(mesh=mesh, model=model, parallel=dict(zero=zero), train=dict(global_batch_size=8)))
    return run, DeviceCopies(run.mesh)


@pytest.mark.parametrize(
    ("mesh", "zero", "array", "device", "bit", "found", "host"),
    [
        ("4x1x1", 0, "params.table", 2, 25, ([2], 4), "n1"),
        ("4x1x1", 0, "optimizer", 1, 0, ([1], 4), "n0"),
        ("4x1x1", 0, "step", 3, 31, ([3], 4), "n1"),
        ("replica=2,data=2", 3, "params.table", 1, 7, ([1, 3], 2), ""),
    ],
)
def test_a_flipped_bit_is_found_with_its_array_and_device(mesh, zero, array, device, bit, found, host, monkeypatch):
    """And with its host, of two, where it is known."""
    hosts = ["n0", "n0", "n1", "n1"]
    monkeypatch.setattr(device_copies, "host_names", lambda devices: hosts)
    run, copies = setup(mesh, zero)
    run = Run(run.config.with_knobs({"parallel.replica_zero": False})) if zero else run
    with jax.set_mesh(run.mesh):
        state = jax.jit(run.step.init)(jax.random.key(0))
        assert copies.differences(state) == []
        paths = jax.tree_util.tree_leaves_with_path(state)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths]
        place = next(number for number, name in enumerate(names) if name.startswith(array) and paths[number][1].size)
        leaves = [leaf for _, leaf in paths]
        leaves[place] = flipped(leaves[place], device, bit)
        bad = jax.tree.unflatten(jax.tree.structure(state), leaves)
        assert copies.differences(bad) == [Difference(names[place], *found)]
        with pytest.raises(
            Diverged, match=rf"after step 7 .* copies of {names[place]}: device {found[0][0]} \(process 0"
        ) as caught:
            copies.check(7, bad)
        assert caught.value.host == host
        hosts[:] = ["n0"] * 4
        with pytest.raises(Diverged) as caught:
            copies.check(7, bad)
        assert caught.value.host == ""
        program = copies._program.lower([leaf for leaf in leaves if leaf.ndim]).compile().as_text()
        assert not any(word in program for word in ("all-reduce", "all-gather", "collective-permute", "all-to-all"))


@pytest.mark.parametrize("compare", [5, 100])
def test_a_run_ends_before_it_saves_a_flipped_bit(run, monkeypatch, compare):
    """At the next comparison, or at the next save where that comes first: the checkpoint before it is named.

    The host of the device is not given to the next start, if there are others.
    """
    monkeypatch.setattr(device_copies, "host_names", lambda devices: [f"n{device.id}" for device in devices])
    take = StepRunner.take

    def flipping(self, step, state, batch):
        state = take(self, step, state, batch)
        if step != 7:
            return state
        return state._replace(params=state.params | {"table": flipped(state.params["table"], 1)})

    monkeypatch.setattr(StepRunner, "take", flipping)
    saves = 5 if compare == 100 else 9
    options = ("--mesh=4x1x1", "--train.steps=12", f"--checkpoint.every={saves}", "--validation.every=0")
    folder = run("run", *options, f"--fault.compare={compare}", code=1)
    (said,) = [line for line in (folder / "log.txt").read_text().splitlines() if "stopped: " in line]
    step, last = (9, "there is no checkpoint") if saves == 9 else (10, "the last good checkpoint is that of step 5")
    assert f"stopped: after step {step} the devices hold different copies of " in said
    assert "of 4 copies; memory or arithmetic" in said
    assert said.endswith(last)
    (named,) = (folder / "heartbeats" / "named.txt").read_text().splitlines()
    assert re.fullmatch(
        rf"n1 \S+Z after step {step} the devices hold different copies of .* of this step is saved", named
    )
