"""A run of `fit` that is killed and stopped five times is the run that nothing happens to."""

import os
import signal

import pytest

import jaxdist
from jaxdist.api.fit_arguments import source_of
from jaxdist.config import RequestError
from tests.fit.conftest import DATA, SIZE, STEPS, Killed, batch_of, fit, kill_at, losses, same, stop_at, trainer
from tests.fit.forms import FORMS, OF_GRAIN, Stateful, generator

CUTS = [kill_at(2), stop_at(4), kill_at(7), stop_at(8), kill_at(11)]
"""What ends the first five starts; step 3 is saved before the second one, and so on."""


def cut_off(folder, make, options, of):
    """Start a run that is ended five times."""
    for number, cut in enumerate(CUTS):
        with pytest.raises(Killed if number % 2 == 0 else SystemExit) as ended:
            fit(folder, make(), of, callbacks=[cut], **options)
        if number % 2:
            assert ended.value.code == jaxdist.STOPPED


@pytest.mark.parametrize("form", [*FORMS, *OF_GRAIN])
def test_five_ends_change_no_bit(form, four, tmp_path):
    if form in OF_GRAIN:
        pytest.importorskip("grain")
    make, options = (FORMS | OF_GRAIN)[form]
    wanted = fit(tmp_path / "straight", make(), four, **options)
    cut_off(tmp_path / "cut", make, options, four)
    same(fit(tmp_path / "cut", make(), four, **options), wanted)
    found = losses(tmp_path / "cut")
    assert list(found) == list(range(1, STEPS + 1))
    assert found == losses(tmp_path / "straight")


@pytest.mark.parametrize("form", ["arrays", "state_dict"])
def test_on_another_mesh_it_is_the_same_run(form, four, tmp_path):
    make, options = FORMS[form]
    fit(tmp_path / "straight", make(), four, **options)
    cut_off(tmp_path / "cut", make, options, four)
    fit(tmp_path / "cut", make(), trainer("2x1x1", zero=3), **options)
    wanted = losses(tmp_path / "straight")
    assert losses(tmp_path / "cut") == pytest.approx(wanted, rel=1e-5)


def test_a_generator_trains_and_is_refused_before_anything_is_lost(four, tmp_path, capfd):
    with pytest.raises(Killed):
        fit(tmp_path, generator(), four, callbacks=[kill_at(8)])
    said = capfd.readouterr().err
    assert (
        "data        a generator, which cannot be told where to go on: this run trains, but cannot be resumed" in said
    )
    assert "ended by Killed: step 6 is saved, but batches cannot be told where to go on\n" in said
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(RequestError, match="the run has taken 6 steps, and batches, a generator, cannot"):
        fit(tmp_path, generator(), four)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_what_skips_in_every_epoch_is_refused():
    """Its second epoch would lack the batches that a resumed run skips in its first."""

    class SkipsAgain:
        def __iter__(self):
            return generator()

        def skip(self, count):
            return self

    source = source_of(SkipsAgain(), None, 0)
    with pytest.raises(RequestError, match="the run has taken 7 steps, and batches, a SkipsAgain, cannot"):
        source.go_on(7, {})


class StopsTheRun(Stateful):
    """Its first batch, by whose shapes the step is compiled, comes with a signal."""

    def __next__(self):
        if self.at == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().__next__()


def test_a_stop_before_the_first_step_leaves_the_process_alone(four, tmp_path):
    """It may be a notebook, which goes on with the next cell."""
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "cut", StopsTheRun(), four)
    assert ended.value.code == jaxdist.STOPPED
    assert (tmp_path / "cut/checkpoints/0").is_dir()
    same(fit(tmp_path / "cut", Stateful(), four), fit(tmp_path / "straight", Stateful(), four))


@pytest.mark.parametrize("make", [generator, Stateful])
def test_before_the_first_step_there_is_nothing_to_go_on_from(make):
    source = source_of(make(), None, 0)
    source.go_on(0, source.facts(0))
    assert source.batch_after(0)["x"].shape == (SIZE, 4)


def test_an_error_of_the_user_is_followed_by_where_the_run_goes_on(four, tmp_path, capfd):
    def evaluate(state):
        return {"loss": {2: 1.0}[int(state.step)]}

    with pytest.raises(KeyError):
        fit(tmp_path, batch_of, four, evaluate=evaluate, validation_every=2, checkpoint_every=3)
    assert "ended by KeyError: the same command continues from step 3\n" in capfd.readouterr().err
    assert "ended by KeyError: the same command" in (tmp_path / "log.txt").read_text()


def test_a_run_that_has_ended_gives_its_last_state_back(four, tmp_path, capfd):
    wanted = fit(tmp_path, DATA, four, batch_size=8)
    capfd.readouterr()
    same(fit(tmp_path, DATA, four, batch_size=8), wanted)
    assert capfd.readouterr().err == f"{tmp_path} is finished at step {STEPS}; to start anew, name another run_dir\n"


def test_more_steps_go_on(four, tmp_path, capfd):
    wanted = fit(tmp_path / "straight", DATA, four, batch_size=8)
    fit(tmp_path / "run", DATA, four, batch_size=8, steps=7)
    same(fit(tmp_path / "run", DATA, four, batch_size=8), wanted)
    assert "note        steps was 7 and is 12: a learning rate" in capfd.readouterr().err
    with pytest.raises(RequestError, match="has taken 12 steps, and steps is 7; give as many"):
        fit(tmp_path / "run", DATA, four, batch_size=8, steps=7)
