"""The figures of a line: whose time is whose."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jaxdist.config import Config
from jaxdist.training import meter
from jaxdist.training.run import Run
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
