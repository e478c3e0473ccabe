"""The figures of a line: whose time is whose."""

import io
import re
import struct
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from jaxdist.config import Config, OptimizerConfig
from jaxdist.training import meter, train_run
from jaxdist.training.console import Screen
from jaxdist.training.forward.optimizer import RateTable, schedule
from jaxdist.training.forward.spikes import Usual
from jaxdist.training.forward.step import Metrics
from jaxdist.training.metrics import Log
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.train_run import reporting_of


def test_where_a_call_waits_for_the_step_each_step_has_its_own_time(monkeypatch):
    now, lines = 0.0, []
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: now))
    config = Config(train=dict(steps=3, global_batch_size=4), optimizer=dict(warmup=0), log=dict(every=1))
    log = SimpleNamespace(say=print, progress=lambda step, values: None, metrics=lines.append)
    measured = meter.Meter(reporting_of(Run(config, devices=jax.devices()[:1])), log)
    zero = jnp.zeros((), jnp.int32)
    for step in (1, 2, 3):
        measured.catch_up()
        measured.next(iter([None]))
        now += 10.0 * step  # the call of the step; its results are there when it returns
        measured.step(step, Metrics(jnp.ones(()).block_until_ready(), zero, zero, zero, zero, {}))
    measured.flush()
    assert [line["step_seconds"] for line in lines] == [10.0, 20.0, 30.0]


class Played:
    """A meter with a clock of its own, two devices with a peak of 10^9 FLOP/s, and steps of 2 micro-batches."""

    def __init__(self, monkeypatch, every: int = 1):
        self.now, self.lines = 0.0, []
        monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(train_run, "peak_flops", lambda kind, precision: 1e9)
        train = dict(steps=100, global_batch_size=8, accumulation=2)
        config = Config(mesh="2x1x1", train=train, log=dict(every=every))
        self.run = Run(config, devices=jax.devices()[:2])
        log = SimpleNamespace(say=print, progress=lambda step, values: None, metrics=self.lines.append)
        self.meter = meter.Meter(reporting_of(self.run), log)

    def step(self, number: int, seconds: float, wait: float = 0.0) -> None:
        """A step that takes so long, after such a wait for its batch."""
        zero = jnp.zeros((), jnp.int32)

        def batches():
            self.now += wait
            yield None

        self.meter.catch_up()
        self.meter.next(batches())
        self.now += seconds
        self.meter.step(number, Metrics(jnp.ones(()).block_until_ready(), zero, zero, zero, zero, {}))

    def pause(self, seconds: float) -> None:
        with self.meter.paused():
            self.now += seconds


def test_the_learning_rate_is_looked_up_and_not_computed_at_every_step(monkeypatch):
    """A program for it would run behind the step that is on its way, and the next step would wait for the host."""
    config = OptimizerConfig(warmup=3, schedule="cosine")
    rate = schedule(config, 9000)
    computed = []
    monkeypatch.setattr(RateTable, "rows", 4000)
    rates = RateTable(rate)
    compute = rates._compute
    monkeypatch.setattr(rates, "_compute", lambda updates: computed.append(updates.size) or compute(updates))
    asked = [0, 1, 2, 3, 1000, 3999, 4000, 8999]
    assert [rates(update) for update in asked] == pytest.approx([float(rate(update)) for update in asked], rel=1e-6)
    assert computed == [4000, 4000, 4000]


class OnDevice:
    """A number on a device that tells when the host waits for it and when it takes it; nothing else can be asked."""

    def __init__(self, value: float, name: str, told: list[str]):
        self.value, self.name, self.told = value, name, told

    def block_until_ready(self):
        self.told.append(f"wait {self.name}")

    def is_ready(self) -> bool:
        return False

    def __array__(self, dtype=None, copy=None):
        self.told.append(f"read {self.name}")
        return np.asarray(self.value)


def on_devices(monkeypatch, told: list[str], every: int, skipped: tuple[int, ...] = (), steps: int = 100):
    """A meter of GPUs that logs every so many steps, and a function that takes a step, which may be skipped."""
    played = Played(monkeypatch, every)
    monkeypatch.setattr(played.meter, "device", SimpleNamespace(platform="gpu", memory_stats=lambda: None))
    monkeypatch.setattr(played.meter, "steps", steps)
    played.meter.log.say = told.append
    in_a_row = 0

    def take(step: int) -> None:
        nonlocal in_a_row
        in_a_row = in_a_row + 1 if step in skipped else 0
        counts = (np.int32(1), np.int32(len([one for one in skipped if one <= step])), np.int32(in_a_row))
        told.append(f"call {step}")
        played.now += 10.0
        played.meter.step(step, Metrics(OnDevice(2.0 + step, str(step), told), np.float32(1), *counts, {}))
        played.meter.catch_up()

    return played, take


def test_between_lines_the_host_reads_nothing_and_waits_for_the_step_before_alone(monkeypatch):
    """A copy, a comparison or a sum of a result would wait for the devices, which then wait for the host."""
    told = []
    played, take = on_devices(monkeypatch, told, every=3)
    for step in range(1, 6):
        take(step)
    first = ["call 1", "call 2", "wait 1", "call 3", "wait 2"]
    assert told == [*first, "call 4", "wait 3", "read 1", "read 2", "read 3", "call 5", "wait 4"]
    played.pause(1.0)
    assert told[-3:] == ["wait 5", "read 4", "read 5"]
    assert [(line["step"], line["loss"]) for line in played.lines] == [(3, 5.0)]


def test_however_rare_lines_are_not_all_results_stay_on_the_devices(monkeypatch):
    told = []
    _, take = on_devices(monkeypatch, told, every=1000, steps=1000)
    monkeypatch.setattr(meter, "MOST_UNREAD", 4)
    for step in range(1, 11):
        take(step)
    assert [one for one in told if one.startswith("read")] == [f"read {step}" for step in range(1, 9)]


def test_skipped_steps_are_reported_one_by_one_and_the_first_that_is_too_much_ends_the_run(monkeypatch):
    """As if each had been read when it ended, with its own time: the run goes on until the next line, but not more."""
    told = []
    played, take = on_devices(monkeypatch, told, every=8, skipped=(2, 4, 5, 6))
    monkeypatch.setattr(played.meter, "reporting", replace(played.meter.reporting, max_skipped=2))
    for step in range(1, 9):
        take(step)
    with pytest.raises(meter.Diverged, match="2 steps in a row up to step 5 were not finite"):
        take(9)
    said = [one.partition(":")[0] for one in told if one.endswith("in all)")]
    assert said == ["step 2", "step 4", "step 5"]
    (line,) = played.lines
    # Step 5 was seen to have ended when step 6 had been called.
    assert (line["step"], line["skipped"], line["step_seconds"]) == (5, 3, 12.0)


def test_steps_that_halve_the_scale_of_the_loss_end_no_run_before_it_is_at_its_least(monkeypatch):
    """And the line of a step has its scale."""
    told = []
    played, _ = on_devices(monkeypatch, told, every=1)
    monkeypatch.setattr(played.meter, "reporting", replace(played.meter.reporting, max_skipped=2))

    def take(step: int, scale: float) -> None:
        counts = (np.int32(1), np.int32(step), np.int32(step))
        played.now += 1.0
        played.meter.step(
            step, Metrics(OnDevice(2.0, str(step), []), np.float32(np.inf), *counts, {}, np.float32(scale))
        )
        played.meter.catch_up()

    for step, scale in enumerate((8.0, 4.0, 2.0, 1.0), start=1):
        take(step, scale)
    with pytest.raises(meter.Diverged, match="4 steps in a row up to step 4"):
        take(5, 1.0)
    assert [line["loss_scale"] for line in played.lines] == [8.0, 4.0, 2.0, 1.0]
    said = [one for one in told if "the scale of the loss" in one]
    assert [one.partition(":")[0] for one in said] == ["step 1", "step 2", "step 3"]
    assert said[0].endswith("; the scale of the loss, 8, is halved")


def test_spikes_are_told_with_what_is_usual_and_too_many_in_a_row_end_the_run(monkeypatch):
    """Its last sentence says how to leave their batches out, beside those that are left out already."""
    told = []
    played, _ = on_devices(monkeypatch, told, every=1)
    reporting = replace(played.meter.reporting, max_skipped=2, left_out="11-20")
    monkeypatch.setattr(played.meter, "reporting", reporting)
    usual = Usual(np.float32(2.5), np.float32(0.5))

    def take(step: int, spikes: int, in_a_row: int, loss: float) -> None:
        counts = (np.int32(1), np.int32(spikes), np.int32(in_a_row))
        metrics = Metrics(
            OnDevice(loss, str(step), []), np.float32(0.25), *counts, {}, np.float32(8.0), usual, np.int32(spikes)
        )
        played.now += 1.0
        played.meter.step(step, metrics)
        played.meter.catch_up()

    for step, (spikes, in_a_row, loss) in enumerate([(1, 1, 9.0), (1, 0, 2.0), (2, 1, 9.0), (3, 2, 9.5)], start=31):
        take(step, spikes, in_a_row, loss)
    end = (
        r"the updates of steps 33 to 34 were skipped, the last one as a spike \(usual are a loss up to 2.5 and a "
        r"gradient norm up to 0.5\); to leave its batches out: --resume with step 32 or one before it, and --data.skip "
        r"11-20,43-44$"
    )
    with pytest.raises(meter.Diverged, match=end):
        take(35, 4, 3, 9.0)
    assert [(line["step"], line["skipped"], line["spikes"]) for line in played.lines] == [
        *((31, 1, 1), (32, 1, 1), (33, 2, 2), (34, 3, 3))
    ]
    assert [one for one in told if "update skipped" in one][1] == (
        "step 33: loss 9.0, gradient norm 0.25: update skipped as a spike (usual are a loss up to 2.5 and a gradient "
        "norm up to 0.5) (1 in a row, 2 in all)"
    )


def test_a_run_that_ends_at_a_step_between_lines_has_its_line(monkeypatch):
    told = []
    played, take = on_devices(monkeypatch, told, every=10)
    for step in range(1, 4):
        take(step)
    played.meter.end(3)
    played.meter.flush()
    assert [line["step"] for line in played.lines] == [3]


def test_validating_and_saving_are_no_part_of_a_step(monkeypatch):
    played = Played(monkeypatch, every=2)
    played.step(1, 10.0)
    played.pause(1000.0)
    played.step(2, 20.0)
    played.pause(500.0)
    played.step(3, 30.0)
    played.step(4, 40.0)
    played.meter.flush()
    assert [line["step_seconds"] for line in played.lines] == [15.0, 35.0]


def test_the_wait_for_data_is_a_part_of_the_step_that_is_told_beside_it(monkeypatch):
    played = Played(monkeypatch, every=2)
    played.step(1, 10.0, wait=4.0)
    played.step(2, 20.0, wait=8.0)
    played.meter.flush()
    (line,) = played.lines
    assert (line["step_seconds"], line["data_seconds"]) == (21.0, 6.0)


def test_tokens_are_those_of_all_micro_batches_and_mfu_is_of_all_devices(monkeypatch):
    played = Played(monkeypatch)
    played.step(1, 10.0)
    played.meter.flush()
    (line,) = played.lines
    tokens = 8 * played.run.config.model.sequence
    assert line["tokens"] == tokens
    assert line["tokens_per_second"] == tokens / 10.0
    assert line["mfu"] == pytest.approx(tokens / 10.0 * played.run.task.flops / (2 * 1e9))


@pytest.fixture
def routed():
    """A meter of a model with 8 experts, 2 for each token, and the lines and sentences that it logs."""
    model = dict(family="moe", experts=8, expert_mlp=16)
    config = Config(model=model, train=dict(steps=1000, global_batch_size=4), log=dict(every=1))
    lines, said = [], []
    log = SimpleNamespace(say=said.append, progress=lambda step, values: None, metrics=lines.append)
    return meter.Meter(reporting_of(Run(config, devices=jax.devices()[:1])), log), lines, said


def play(measured: meter.Meter, loads: list[float]) -> None:
    """Steps whose fullest expert has so many times the mean load."""
    zero = np.zeros((), np.int32)
    for step, load in enumerate(loads, start=measured.ended + 1):
        further = dict(balance_loss=1.5, z_loss=4.0, load_max=load, dispatch_rounds=2.0)
        measured.step(step, Metrics(np.ones(()), zero, zero, zero, zero, further))
        measured.flush()


def test_a_line_of_a_routed_model_has_what_its_routers_tell(routed):
    measured, lines, _ = routed
    play(measured, [1.25])
    told = {name: lines[0][name] for name in ("balance_loss", "z_loss", "load_max", "dispatch_rounds")}
    assert told == dict(balance_loss=1.5, z_loss=4.0, load_max=1.25, dispatch_rounds=2.0)


def test_a_router_that_stays_collapsed_is_one_warning(routed):
    """Nearly all tokens at two of eight experts: four times the mean load."""
    measured, _, said = routed
    play(measured, [3.9] * 99 + [1.2] + [3.9] * 99)
    assert said == []
    play(measured, [3.9] * 200)
    (warning,) = said
    assert warning.startswith("warning: a router has collapsed: for 100 steps up to 200 ")
    assert warning.endswith("raise model.balance_rate or model.balance_loss")


def test_a_log_of_ten_thousand_steps_stays_under_128_kib(tmp_path):
    """With its validations, figures as wide as those of a GPU, and 2.5 kB for what stands before the first step."""
    config, text = Config(run_dir=tmp_path, log=dict(tensorboard=False)), io.StringIO()
    figures = dict(loss=2.1234, tokens_per_second=1234567.0, mfu=0.451, grad_norm=0.856, learning_rate=3.97e-3)
    with Log(config.log, RunFolder(tmp_path), steps=10000, first=0, screen=Screen(text)) as log:
        for step in range(1, 10001):
            if step % config.log.every == 0:
                log.metrics(figures | dict(step=step, step_seconds=1.89, data_seconds=0.001))
            if step % config.validation.every == 0:
                log.metrics(dict(step=step, validation_loss=2.3456, validation_batches=8))
        assert len(text.getvalue()) + 2500 < 128 * 1024
        log.metrics(figures | dict(step=10000, step_seconds=1.89, data_seconds=0.08))
    lines = text.getvalue().splitlines()
    assert len(lines) == 1000 + 133 + 1
    assert re.search(r"1890 ms  data 80.0 ms  \d\d:\d\d:\d\dZ$", lines[-1])
    assert re.search(r"1890 ms  \d\d:\d\d:\d\dZ$", lines[-2])
    assert re.search(r"1890 ms  5:14:41 left  \d\d:\d\d:\d\dZ$", lines[0])


def events(file: Path) -> list[event_pb2.Event]:
    """What an event file of TensorBoard holds: records of length (8 bytes), its checksum (4), content, checksum (4)."""
    content, at, found = file.read_bytes(), 0, []
    while at < len(content):
        (length,) = struct.unpack("<Q", content[at : at + 8])
        found.append(event_pb2.Event.FromString(content[at + 12 : at + 12 + length]))
        at += 12 + length + 4
    return found


def shown(files: list[Path]) -> list[tuple[int, float]]:
    """(step, loss) as TensorBoard shows them: a file that starts at a step replaces what was from there on."""
    points = []
    for event in [event for file in files for event in events(file)]:
        if event.HasField("session_log"):
            assert event.session_log.status == event_pb2.SessionLog.START
            points = [point for point in points if point[0] < event.step]
        points += [(event.step, value.simple_value) for value in event.summary.value if value.tag == "loss"]
    return points


def test_tensorboard_shows_each_step_of_a_resumed_run_once(tmp_path):
    """As the run that goes on had it: steps 3 and 4 were run, lost, and run again."""
    config, folder = Config(run_dir=tmp_path), RunFolder(tmp_path)
    figures = dict(
        tokens_per_second=1.0, mfu=None, grad_norm=1.0, learning_rate=1.0, step_seconds=1.0, data_seconds=0.0
    )
    files = []
    for first, last, loss in ((0, 4, 1.0), (2, 5, 2.0)):
        with Log(config.log, folder, steps=5, first=first, screen=Screen(io.StringIO())) as log:
            for step in range(first + 1, last + 1):
                log.metrics({"step": step, "loss": loss, **figures})
        (file,) = folder.tensorboard.glob("events.*")
        files.append(file.rename(tmp_path / f"{last}"))  # within a second both would have one name
    assert shown(files) == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0)]
