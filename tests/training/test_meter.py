"""The figures of a line: whose time is whose."""

import io
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jaxdist.config import Config
from jaxdist.training import meter
from jaxdist.training.folder import RunFolder
from jaxdist.training.metrics import Log
from jaxdist.training.run import Run
from jaxdist.training.screen import Screen
from jaxdist.training.step import Metrics


def test_where_a_call_waits_for_the_step_each_step_has_its_own_time(monkeypatch):
    now, lines = 0.0, []
    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: now))
    config = Config(train=dict(steps=3, global_batch_size=4), optimizer=dict(warmup=0), log=dict(every=1))
    log = SimpleNamespace(say=print, progress=lambda values: None, metrics=lines.append)
    measured = meter.Meter(Run(config, devices=jax.devices()[:1]), log)
    zero = jnp.zeros((), jnp.int32)
    for step in (1, 2, 3):
        measured.catch_up()
        measured.next(iter([None]))
        now += 10.0 * step  # the call of the step; its results are there when it returns
        measured.step(step, Metrics(jnp.ones(()).block_until_ready(), zero, zero, zero, zero, {}))
    measured.flush()
    assert [line["step_seconds"] for line in lines] == [10.0, 20.0, 30.0]


def test_a_log_of_ten_thousand_steps_stays_under_128_kib(tmp_path):
    """With its validations, figures as wide as those of a GPU, and 2.5 kB for what stands before the first step."""
    config, text = Config(run_dir=tmp_path, log=dict(tensorboard=False)), io.StringIO()
    figures = dict(loss=2.1234, tokens_per_second=1234567.0, mfu=0.451, grad_norm=0.856, learning_rate=3.97e-3)
    with Log(config, RunFolder(tmp_path), steps=10000, first=0, screen=Screen(text)) as log:
        for step in range(1, 10001):
            if step % config.log.every == 0:
                log.metrics(figures | dict(step=step, step_seconds=1.89, data_seconds=0.001))
            if step % config.validation.every == 0:
                log.metrics(dict(step=step, validation_loss=2.3456))
        assert len(text.getvalue()) + 2500 < 128 * 1024
        log.metrics(figures | dict(step=10000, step_seconds=1.89, data_seconds=0.08))
    lines = text.getvalue().splitlines()
    assert len(lines) == 1000 + 133 + 1
    assert re.search(r"1890 ms  data 80.0 ms  \d\d:\d\d:\d\dZ$", lines[-1])
    assert re.search(r"1890 ms  \d\d:\d\d:\d\dZ$", lines[-2])
    assert re.search(r"1890 ms  5:14:41 left  \d\d:\d\d:\d\dZ$", lines[0])
