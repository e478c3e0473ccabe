"""Times of steps and what follows from them: on clocks, peaks and programs that are made up."""

from types import SimpleNamespace

import jax
import pytest

from jaxdist.bench.measuring import Timed, measure_together
from jaxdist.bench.step import report
from jaxdist.config import Config
from jaxdist.planning import hardware
from jaxdist.training.run import Run


class Program:
    """Its n-th step takes n seconds, and those of another program so many more."""

    def __init__(self, more: float, began: list[float]):
        self.more, self.began, self.steps, self.seconds, self.placed = more, began, 0, [], False

    def place(self, note) -> None:
        self.placed = True

    def drop(self) -> None:
        self.placed = False

    def advance(self, note) -> float:
        assert self.placed
        self.steps += 1
        self.began.append(self.more)
        return self.steps + self.more


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_the_first_rounds_are_left_out_and_the_last_ones_are_measured(warmup):
    """For each program its own, though they change their order in every other round."""
    began = []
    programs = [Program(more, began) for more in (0.0, 100.0, 200.0)]
    measure_together(programs, warmup, repeats=3)
    for one in programs:
        assert one.seconds == [warmup + turn + one.more for turn in (1, 2, 3)]
        assert not one.placed
    assert began[:6] == [0.0, 100.0, 200.0, 200.0, 100.0, 0.0]
    assert len(began) == 3 * (warmup + 3)


@pytest.fixture
def timed() -> Timed:
    """Steps of 2 micro-batches on two devices."""
    train = dict(steps=10, global_batch_size=8, accumulation=2)
    run = Run(Config(mesh="2x1x1", train=train), devices=jax.devices()[:2])
    memory = SimpleNamespace(argument_size_in_bytes=1, temp_size_in_bytes=2)
    program = SimpleNamespace(memory_analysis=lambda: memory)
    return Timed(run, program, 1.0, seconds=[1.0, 2.0, 4.0, 8.0, 16.0])


def test_a_step_has_the_tokens_of_all_its_micro_batches(timed):
    assert timed.units == 8 * timed.run.config.model.sequence


def test_bench_step_tells_the_median_and_the_share_of_the_peak_of_all_devices(timed, monkeypatch):
    monkeypatch.setattr(hardware, "peak_flops", lambda kind, precision: 1e9)
    result = report(timed)
    tokens = 8 * timed.run.config.model.sequence
    assert result["step_seconds"] == 4.0
    assert result["step_seconds_quartiles"] == [2.0, 8.0]
    assert result["tokens_per_step"] == tokens
    assert result["tokens_per_second"] == tokens / 4.0
    assert result["mfu"] == pytest.approx(tokens / 4.0 * timed.run.task.flops / (2 * 1e9))
