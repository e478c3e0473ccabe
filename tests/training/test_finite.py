"""A state that is not finite is never saved: the run ends with 1, and names it and the newest step that is finite."""

import os
import re
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from jaxdist import train
from jaxdist.mesh import DATA, make_mesh, parse_mesh
from jaxdist.sharding import HOST
from jaxdist.training import run as runs
from jaxdist.training.checkpoint.finite_state import first_not_finite
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.meter import Meter
from jaxdist.training.trainer import Trainer
from tests.tiers import exhaustive
from tests.training.conftest import SMALL, over
from tests.training.curves import lines, parameters

BAD = 4
"""The step whose update is not finite, in runs that are `spoilt`."""

TINY = over(SMALL, "--model.layers=1", "--train.steps=8", "--checkpoint.every=1", "--validation.every=0")


@pytest.fixture
def start(text, tmp_path, capsys):
    """Train in this process: (exit code, run folder, what was told)."""

    def call(*more: str) -> tuple[int, Path, str]:
        code = train.main(over(TINY, f"--data.path={text}", f"--run-dir={tmp_path / 'run'}", *more))
        return code, tmp_path / "run", capsys.readouterr().err

    return call


@pytest.fixture
def spoilt(monkeypatch):
    """The update of step `BAD` is infinite; its loss and gradient, as those of the steps before, are finite."""
    rate = lambda config, steps: lambda count: jnp.where(count == BAD - 1, jnp.inf, config.learning_rate)
    monkeypatch.setattr("jaxdist.training.forward.optimizer.schedule", rate)


@pytest.fixture
def handlers():
    """A run that a signal has stopped ignores further ones, to the end of its process."""
    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


def steps(folder: Path) -> list[int]:
    return StepDir(folder / "checkpoints").steps()


def assert_finite(folder: Path) -> None:
    """All that was saved."""
    for step in steps(folder):
        assert np.isfinite(parameters(folder, step)).all(), step
    best = folder / "checkpoints" / "best"
    assert max(StepDir(best).steps(), default=0) < BAD


def test_knobs_that_make_the_weights_overflow_leave_no_checkpoint(start):
    """Each is a number that float32 holds; their product is not."""
    knobs = ("--optimizer.learning-rate=3e38", "--optimizer.weight-decay=1e4", "--optimizer.warmup=0")
    code, folder, said = start(*knobs)
    assert code == 1
    assert re.search(
        r"stopped: params\.[\w.]+ holds NaN or infinity after step 1, which is not saved; there is no checkpoint", said
    )
    assert [line["skipped"] for line in lines(folder)] == [0], "the guard of the step has seen nothing"
    assert steps(folder) == []


LAYOUTS = {
    "zero 3": ["--mesh=4x1x1", "--parallel.zero=3"],
    "offload": ["--mesh=2x1x1", "--parallel.zero=3", "--precision=mixed", "--parallel.offload=optimizer"],
    "pipeline": ["--mesh=1x1x2", "--pipeline.microbatches=2", "--model.layers=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero 3", *exhaustive([("offload",), ("pipeline",)])])
def test_the_newest_finite_step_stays_and_is_named(start, spoilt, layout):
    code, folder, said = start(*LAYOUTS[layout], "--checkpoint.keep=2", "--validation.every=1")
    assert code == 1
    assert re.search(r"stopped: params\.[\w.]+ holds NaN or infinity after step 4, which is not saved; ", said)
    assert said.endswith("; the last good checkpoint is that of step 3\n")
    assert steps(folder) == [2, 3]
    assert_finite(folder)


def test_the_last_step_is_checked_too(start, spoilt):
    code, folder, said = start("--checkpoint.every=0", f"--train.steps={BAD}")
    assert code == 1
    assert "after step 4, which is not saved; there is no checkpoint" in said
    assert steps(folder) == []


def asked_to_stop(monkeypatch, after: int) -> None:
    """SIGTERM comes while step `after` is on its way."""
    step = Meter.step

    def then(self, number, metrics):
        step(self, number, metrics)
        if number == after:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # a thread takes it

    monkeypatch.setattr(Meter, "step", then)


@pytest.mark.parametrize(("after", "code"), [(BAD - 1, 85), (BAD, 1)])
def test_a_signal_ends_with_85_only_where_a_finite_state_was_saved(start, spoilt, handlers, monkeypatch, after, code):
    asked_to_stop(monkeypatch, after)
    found, folder, said = start("--checkpoint.every=2")
    assert found == code
    if code == 85:
        assert said.endswith("stopped by SIGTERM: step 3 is saved; the same command continues\n")
        assert steps(folder) == [2, 3]
    else:
        assert said.endswith("after step 4, which is not saved; the last good checkpoint is that of step 2\n")
        assert steps(folder) == [2]
    assert_finite(folder)


@pytest.mark.slow
def test_the_best_is_not_saved_with_an_optimizer_that_is_not_finite(start, monkeypatch):
    """Its weights are finite, and better than those before."""
    rule = runs.optimizer

    def count_with_infinity(*arguments) -> optax.GradientTransformation:
        def update(updates, state, params=None):
            return updates, jnp.where(state == BAD - 1, jnp.inf, state + 1)

        return optax.chain(rule(*arguments), optax.GradientTransformation(lambda params: jnp.zeros(()), update))

    monkeypatch.setattr(runs, "optimizer", count_with_infinity)
    code, folder, said = start("--checkpoint.every=0", f"--validation.every={BAD}")
    assert code == 1
    assert "stopped: optimizer.1 holds NaN or infinity after step 4, which is not saved; there is no checkpoint" in said
    assert np.isfinite([line["validation_loss"] for line in lines(folder) if "validation_loss" in line]).all()
    assert not (folder / "checkpoints" / "best").exists()


@pytest.mark.slow
def test_only_the_first_save_compiles(start, monkeypatch):
    """Of a pipeline, whose layers are also put in order before they are saved."""
    compiled: list[str] = []
    saves: list[int] = []
    save = Trainer.save

    def counted(self, step, state):
        before = len(compiled)
        save(self, step, state)
        saves.append(len(compiled) - before)

    monkeypatch.setattr(Trainer, "save", counted)

    def listen(name: str, *_: object, **__: object) -> None:
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert start("--mesh=1x1x2", "--pipeline.microbatches=2", "--model.layers=2", "--train.steps=4")[0] == 0
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert saves[0] > 0
    assert saves[1:] == [0, 0, 0]


def on_four_devices(values: np.ndarray, split: bool, kind: str | None = None) -> jax.Array:
    mesh = jax.sharding.get_mesh()
    spec = jax.P(DATA) if split else jax.P()
    return jax.device_put(values, NamedSharding(mesh, spec, memory_kind=kind))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_number_on_one_device_is_enough(value):
    """Of weights, of moments in the host's memory, of variables, in any float format; the first is named."""
    with jax.set_mesh(make_mesh(parse_mesh("4x1x1"), jax.devices()[:4])):
        names = {"params": jnp.float32, "optimizer": jnp.float32, "variables": jnp.bfloat16}
        good = {
            name: {"a": on_four_devices(np.arange(8), True), "w": on_four_devices(np.ones((8, 3), dtype), True)}
            for name, dtype in names.items()
        }
        good["optimizer"]["w"] = on_four_devices(np.full((8, 3), 3e38, np.float32), True, HOST)
        assert first_not_finite(good) is None
        assert first_not_finite({}) is None
        for name, dtype in names.items():
            spoilt = np.ones((8, 3), dtype)
            spoilt[5, 2] = value  # on the third device
            there = on_four_devices(spoilt, True, HOST if name == "optimizer" else None)
            assert first_not_finite(good | {name: good[name] | {"w": there}}) == f"{name}.w"
        whole = on_four_devices(np.full((2, 2), value, np.float32), False)
        assert first_not_finite({"first": whole, "second": whole}) == "first"


def test_a_copy_that_differs_from_the_others_is_seen():
    """All processes have to get the same answer, whichever of them has the copy."""
    with jax.set_mesh(make_mesh(parse_mesh("4x1x1"), jax.devices()[:4])):
        good = on_four_devices(np.ones((4, 2), np.float32), False)
        copies = [shard.data for shard in good.addressable_shards]
        copies[2] = jax.device_put(np.full((4, 2), np.nan, np.float32), copies[2].device)
        differing = jax.make_array_from_single_device_arrays(good.shape, good.sharding, copies)
        assert np.isfinite(np.asarray(differing)).all()
        assert first_not_finite({"good": good, "differing": differing}) == "differing"
