"""What `fit` does beside going on: the steps, the metrics, validation, callbacks, and what is not finite."""

import re
import signal
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdist
from jaxdist.api import fit_parts
from jaxdist.api.fit_parts import Runner
from jaxdist.cluster import phase_clock
from jaxdist.cluster.heartbeat import COMPILING, STEPPING
from jaxdist.cluster.watchdog import Watchdog
from jaxdist.config import RequestError
from jaxdist.training import meter
from jaxdist.training.engine import Engine
from jaxdist.training.forward.step import Metrics
from jaxdist.training.goodput import goodput, starts_of
from jaxdist.training.meter import Diverged
from jaxdist.training.run_dir import RunFolder
from tests.fit.conftest import DATA, SIZE, STEPS, batch_of, fit, lines, losses, same, stop_at, trainer
from tests.training.test_device_copies import flipped
from tests.training.test_runs import KEYS


@pytest.fixture(scope="module")
def fitted(four, tmp_path_factory):
    """A run that nothing happens to: its folder and its last state."""
    folder = tmp_path_factory.mktemp("fitted") / "run"
    return folder, fit(folder, batch_of, four, log_tensorboard=True)


def test_it_is_a_loop_over_step_to_the_bit(four, fitted):
    folder, found = fitted
    state = four.init(0)
    wanted = {}
    for step in range(STEPS):
        state, metrics = four.step(state, batch_of(step))
        wanted[step + 1] = float(metrics.loss)
    same(found, state)
    assert losses(folder) == wanted


def test_its_folder_is_that_of_a_run(fitted):
    folder, _ = fitted
    there = {path.name for path in folder.iterdir()}
    assert there >= {"metrics.jsonl", "log.txt", "loss.png", "environment.json", "checkpoints", "tensorboard"}
    of_train = {name.replace("token", "row") for name in KEYS} - {"learning_rate"}
    assert set(lines(folder)[0]) >= of_train
    assert lines(folder)[-1]["rows"] == STEPS * SIZE


def test_batches_of_other_shapes_are_taken(four, tmp_path, monkeypatch):
    """As the last one of an epoch may have; the watchdog knows that the step is compiled once more, and only once."""
    noted = []
    note = Watchdog.note

    def keep(watchdog, phase, *step, **begins):
        noted.append(phase)
        note(watchdog, phase, *step, **begins)

    monkeypatch.setattr(Watchdog, "note", keep)

    def short(step):
        return {name: a[:4] for name, a in batch_of(step).items()} if step >= 2 else batch_of(step)

    found = fit(tmp_path, short, four, steps=4)
    state = four.init(0)
    for step in range(4):
        state, _ = four.step(state, short(step))
    same(found, state)
    assert noted.count(COMPILING) == 2
    assert noted[noted.index(COMPILING, noted.index(STEPPING)) + 1] == STEPPING


def test_compiling_is_no_time_of_a_step(four, tmp_path, monkeypatch):
    """That of the first step, and that of a batch with other shapes; each compilation takes an hour here."""
    over = 0.0
    ahead_of = lambda clock: lambda: clock() + over
    clocks = SimpleNamespace(
        perf_counter=ahead_of(time.perf_counter), monotonic=ahead_of(time.monotonic), time=ahead_of(time.time)
    )
    for module in (meter, phase_clock):
        monkeypatch.setattr(module, "time", clocks)
    compiled = Engine.compile

    def slow(*arguments):
        nonlocal over
        over += 3600.0
        return compiled(*arguments)

    monkeypatch.setattr(Engine, "compile", slow)
    short = lambda step: {name: a[: 4 if step == 2 else 8] for name, a in batch_of(step).items()}
    fit(tmp_path, short, four, steps=4)
    assert sum(line["step_seconds"] for line in lines(tmp_path)) < 1800
    (start,) = starts_of(RunFolder(tmp_path))
    assert 7200 <= start.spent.seconds[COMPILING] < 9000
    assert start.spent.seconds[STEPPING] < 1800
    assert 7200 <= goodput([start]).compiling < 9000


def test_arrays_of_jax_are_laid_out_in_the_order_of_steps(four, tmp_path, fitted):
    found = fit(tmp_path, lambda step: jax.device_put(batch_of(step), four.batch_sharding), four, steps=3)
    assert losses(tmp_path) == {step: loss for step, loss in losses(fitted[0]).items() if step <= 3}
    assert int(found.step) == 3


# ---- validation


def test_the_best_state_is_kept(four, tmp_path):
    asked = []

    def evaluate(state):
        asked.append(int(state.step))
        return {"loss": {4: 3.0, 8: 1.0, 12: 2.0}[int(state.step)], "accuracy": four.evaluate(state, DATA)["loss"]}

    fit(tmp_path, batch_of, four, evaluate=evaluate, validation_every=4)
    assert asked == [4, 8, 12]
    assert [line["validation_loss"] for line in lines(tmp_path) if "validation_loss" in line] == [3.0, 1.0, 2.0]
    assert [path.name for path in (tmp_path / "checkpoints" / "best" / "sums").iterdir()] == ["8.json"]


@pytest.mark.parametrize("several", [False, True])
def test_a_batch_or_several_are_evaluated(several, four, tmp_path):
    """Of any number of rows."""
    cut = [{name: a[rows] for name, a in DATA.items()} for rows in (slice(0, 25), slice(25, 40))]
    state = fit(tmp_path, batch_of, four, steps=2, evaluate=cut if several else DATA, validation_every=0)
    line = lines(tmp_path)[-1]
    assert line["validation_loss"] == pytest.approx(four.evaluate(state, DATA)["loss"], rel=1e-6)
    assert line["validation_batches"] == 1 + several


# ---- callbacks


def test_a_callback_sees_each_step_and_ends_the_run(four, tmp_path, capfd):
    seen = []

    def call(step, state, metrics):
        assert not jax.sharding.get_mesh().axis_names
        seen.append((step, float(metrics["loss"]), int(state.step)))
        return metrics.get("validation_loss", 9.0) < 5.0 and metrics["loss"] < 9.0

    options = {"evaluate": lambda state: {"loss": 7.0 - int(state.step)}, "validation_every": 2}
    ended = fit(tmp_path, batch_of, four, callbacks=[call], **options)
    assert [step for step, _, _ in seen] == [state for _, _, state in seen] == [1, 2, 3, 4]
    assert {step: loss for step, loss, _ in seen} == losses(tmp_path)
    assert [line["step"] for line in lines(tmp_path) if "validation_loss" in line] == [2, 4]
    capfd.readouterr()
    same(fit(tmp_path, batch_of, four, callbacks=[call], **options), ended)
    assert "is finished at step 4" in capfd.readouterr().err
    assert len(seen) == 4


@pytest.mark.parametrize("every", [2, 3])
def test_the_step_that_a_callback_ends_with_has_its_line(every, four, tmp_path):
    """Though none is due, and its results were waited for by the validation before the callback."""
    options = {"evaluate": DATA, "validation_every": every, "callbacks": [lambda step, *_: step == 2]}
    fit(tmp_path, batch_of, four, log_every=10, **options)
    assert list(losses(tmp_path)) == [2]


def test_a_callback_that_answers_something_else_is_refused(four, tmp_path):
    with pytest.raises(ValueError, match=r"a callback returned 'yes'; return True to end the run, or nothing"):
        fit(tmp_path, batch_of, four, callbacks=[lambda step, state, metrics: "yes"])


def test_signals_are_the_scripts_again_when_it_has_ended(four, fitted, tmp_path):
    """In a notebook Ctrl-C is an interruption again."""
    before = signal.getsignal(signal.SIGINT)
    fit(tmp_path, batch_of, four, steps=1, callbacks=[lambda *_: signal.getsignal(signal.SIGINT) == before])
    assert signal.getsignal(signal.SIGINT) == before


def test_a_run_that_is_stopped_says_so(four, tmp_path, capfd):
    interrupt = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, batch_of, four, callbacks=[stop_at(2)], checkpoint_every=0)
    assert signal.getsignal(signal.SIGINT) == interrupt
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    assert ended.value.code == jaxdist.STOPPED == 85
    said = re.search(r"stopped by SIGTERM: step (\d+) is saved; the same command continues\n", capfd.readouterr().err)
    assert (tmp_path / "checkpoints" / said[1]).is_dir()


# ---- what is not finite


def poisoned(*steps: int):
    def batches(step):
        batch = batch_of(step)
        return batch | {"y": batch["y"] * np.nan} if step + 1 in steps else batch

    return batches


def test_steps_that_are_not_finite_are_skipped(four, tmp_path, capfd):
    fit(tmp_path, poisoned(2, 5), four, steps=6, train_max_skipped=2)
    assert [line["skipped"] for line in lines(tmp_path)] == [0, 1, 1, 1, 2, 2]
    assert losses(tmp_path)[2] is None
    assert "step 5: loss nan, gradient norm nan: update skipped (1 in a row, 2 in all)" in capfd.readouterr().err


def test_too_many_of_them_end_the_run(four, tmp_path, capfd):
    with pytest.raises(Diverged, match="2 steps in a row up to step 6 were not finite"):
        fit(tmp_path, poisoned(5, 6), four, train_max_skipped=2)
    said = capfd.readouterr().err
    assert "stopped: 2 steps in a row up to step 6 were not finite; the last good checkpoint is that of step 3" in said


def test_an_update_that_is_not_finite_is_not_saved(tmp_path):
    rate = lambda count: jax.numpy.where(count == 4, np.inf, 1e-2)
    with pytest.raises(Diverged, match=r"holds NaN or infinity after step 6, which is not saved"):
        fit(tmp_path, batch_of, trainer(optimizer=optax.sgd(rate)))
    assert not (tmp_path / "checkpoints" / "6").exists()


@pytest.mark.parametrize("compare", [2, 100])
def test_a_run_ends_before_it_saves_a_bit_that_one_device_has_wrong(tmp_path, monkeypatch, compare):
    """At the next comparison, or at the next save where that comes first."""
    take = Runner.take

    def flipping(self, step, state, batch):
        state = take(self, step, state, batch)
        if step != 3:
            return state
        leaves, tree = jax.tree.flatten(state.params)
        return state._replace(params=jax.tree.unflatten(tree, [flipped(leaves[0], 1), *leaves[1:]]))

    monkeypatch.setattr(Runner, "take", flipping)
    of = trainer(mesh="4x1x1", zero=0)
    with pytest.raises(Diverged, match=f"after step {4 if compare == 2 else 5} the devices hold different copies of"):
        fit(tmp_path, batch_of, of, checkpoint_every=5, fault_compare=compare)
    assert not list((tmp_path / "checkpoints").glob("[0-9]*"))


# ---- several processes


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_process_reads_the_rows_of_its_devices_alone(accumulation):
    """Here it has all of them: each is read once, beside one that shows what a row holds."""
    of = trainer(accumulation=accumulation)
    numbers, read = np.arange(SIZE) * 3, []

    def rows(some):
        read.extend(some)
        return {name: a[some] for name, a in DATA.items()}

    found = of._batches.of_own_rows(numbers, rows)
    assert sorted(read) == sorted([*numbers, numbers[0]])
    wanted = of._batches.micro_batches(of._batches.checked(rows(numbers)))
    same(found, wanted)
    assert all(
        a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    )


@pytest.mark.parametrize("ends", [True, False])
def test_all_processes_end_or_none(ends, monkeypatch):
    """One of two that would go on waits in the next step for the other, which saves."""
    monkeypatch.setattr(fit_parts.jax, "process_count", lambda: 2)
    monkeypatch.setattr(fit_parts, "all_come", lambda seconds: ends)
    newest = Metrics(*[np.float32(1.0)] * 5, further={})
    call = fit_parts.called(SimpleNamespace(newest=newest), lambda step, state, metrics: True)
    state = SimpleNamespace(step=jnp.zeros(()))
    if ends:
        assert call(range(3, 4), state, {}) is True
        return
    with pytest.raises(RequestError, match="after step 3 here, but not in all processes"):
        call(range(3, 4), state, {})
