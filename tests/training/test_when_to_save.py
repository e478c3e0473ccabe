"""At which steps a run saves."""

import math
from types import SimpleNamespace

import pytest

from jaxdist.config import Config
from jaxdist.training import save_policy
from jaxdist.training.save_policy import SavePolicy
from jaxdist.training.starting import save_policy_of
from jaxdist.weights.base import NoBase


def saved(steps: int = 20, rows: int = 100, seconds: float = 0.0, monkeypatch=None, **knobs) -> list[int]:
    """The steps of a run of batches of 16, each of which takes `seconds`, after which it saves."""
    config = Config(checkpoint={"every": 0} | knobs, train={"global_batch_size": 16})
    task = SimpleNamespace(baseline=lambda: 1.0, baseline_name="", loss_unit="token", rows=rows, fingerprint="")
    engine = SimpleNamespace(step=SimpleNamespace(late=0, logical=lambda state: state), mesh=None)
    run = SimpleNamespace(task=task, config=config, steps=steps, engine=engine)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(save_policy.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(SavePolicy, "facts", lambda self, step: {})
    found = []
    checkpoints = SimpleNamespace(save=lambda step, state, facts: found.append(step))
    one = save_policy_of(run, checkpoints, NoBase())
    for step in range(1, steps + 1):
        clock.now += seconds
        if one.due(range(step, step + 1)):
            one.save(step, None)
    return found


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        (dict(), [20]),
        (dict(every=6), [6, 12, 18, 20]),
        (dict(epochs=True), [math.ceil(100 * epoch / 16) for epoch in (1, 2, 3)] + [20]),
        (dict(minutes=1, seconds=25), [3, 6, 9, 12, 15, 18, 20]),
        (dict(minutes=1, seconds=25, every=4), [3, 4, 7, 8, 11, 12, 15, 16, 19, 20]),
    ],
)
def test_it_saves_when_asked_to_and_at_the_end(options, steps, monkeypatch):
    assert saved(monkeypatch=monkeypatch, **options) == steps
