"""What a run looks at before it goes on from a checkpoint: its data, and a validation that was stopped. Nothing is
compiled, and no checkpoint is written."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxdist.config import Config, RequestError
from jaxdist.data import sources
from jaxdist.data.tokens import TokenWriter
from jaxdist.training import opening, train_run, trainer
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.starting import save_policy_of
from jaxdist.weights.base import NoBase
from tests.data.files import save_tokenizer

MODEL = dict(layers=1, embed=16, heads=2, vocab=64, sequence=8)


# ---- data


def run_on(path, vocab=64, **data) -> Run:
    config = Config(
        mesh="1x1x1",
        model=MODEL | {"vocab": vocab},
        data=dict(path=path, **data),
        train=dict(global_batch_size=4, steps=10),
    )
    return Run(config, devices=jax.devices()[:1])


def write(path, ids) -> None:
    path.unlink(missing_ok=True)
    with TokenWriter(path, "uint16") as writer:
        writer.write(ids)


class WentOn(Exception):
    """The run has gone past its look at the data."""


class Kept:
    """The checkpoints of a run that was stopped at step 5, with the facts that it saved."""

    def __init__(self, facts: dict):
        self._facts = facts

    def __call__(self, *arguments):
        return contextlib.nullcontext(self)

    def find_start(self, *arguments, **options):
        return SimpleNamespace(step=5)

    def facts(self, found):
        return self._facts

    def set_aside(self, after):
        assert after == 5
        raise WentOn


@pytest.fixture
def resume(tmp_path, monkeypatch):
    """Go on with a run from the facts that it saved at step 5: raises `WentOn`, or what refuses it."""

    def call(run: Run, facts: dict) -> None:
        folder = RunFolder(tmp_path / "run")
        folder.path.mkdir(exist_ok=True)
        quiet = SimpleNamespace(open=lambda *_, **__: None, write=lambda *_: None)
        watchdog = SimpleNamespace(beat_in=lambda path: None)
        job = SimpleNamespace(log=quiet, stop=SimpleNamespace(), note=lambda *_: None, watchdog=watchdog)
        monkeypatch.setattr(opening, "Checkpoints", Kept(facts))
        monkeypatch.setattr(opening, "locked", lambda *_: contextlib.nullcontext(lambda: None))
        monkeypatch.setattr(train_run, "finished", lambda *_: False)
        train_run.train(run, folder, job)

    return call


@pytest.mark.parametrize("changed", [None, 0, 350, 399], ids=["none", "first", "held-out", "last"])
def test_a_run_goes_on_with_the_data_of_its_checkpoint_alone(resume, tmp_path, changed):
    """One token makes other data, in the held-out part too; a new file with the same tokens does not."""
    path, ids = tmp_path / "tokens.bin", np.arange(400) % 64
    write(path, ids)
    before = run_on(path)
    with jax.set_mesh(before.mesh):
        facts = save_policy_of(before, None, NoBase()).facts(5)
    if changed is not None:
        ids[changed] = 63 - ids[changed]
    write(path, ids)
    if changed is None:
        with pytest.raises(WentOn):
            resume(run_on(path), facts)
    else:
        with pytest.raises(RequestError, match=r"the training data is not what the run in .* has seen so far"):
            resume(run_on(path), facts)


def keep(facts: dict, folder) -> None:
    """Write facts as the checkpoint of step 5 has them."""
    step = folder / "checkpoints" / "5" / "facts"
    step.mkdir(parents=True, exist_ok=True)
    (step / "metadata").write_text(json.dumps(facts))


def never(*arguments, **options):
    raise AssertionError("it was read")


TEXT = "".join(f"line {i}: the tide of {i * i} comes and goes, and {'comes again ' * (i % 7)}\n" for i in range(900))


@pytest.mark.parametrize("mixed", [False, True], ids=["single", "mixture"])
def test_other_files_are_refused_before_they_are_read(resume, tmp_path, monkeypatch, mixed):
    """By their sizes and samples, under any name; the same content under another name goes on."""
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))

    def run_with(name, content):
        path = tmp_path / name
        path.write_text(content)
        if not mixed:
            return run_on(path, vocab=300)
        (tmp_path / "b.txt").write_text(TEXT)
        mixture = {name: {"path": str(one), "weight": 1} for name, one in (("a", path), ("b", tmp_path / "b.txt"))}
        return run_on(None, vocab=300, mixture=mixture)

    before = run_with("a.txt", TEXT)
    with jax.set_mesh(before.mesh):
        facts = save_policy_of(before, None, NoBase()).facts(5)
    keep(facts, tmp_path / "run")
    with pytest.raises(WentOn):
        resume(run_with("same.txt", TEXT), facts)
    middle = len(TEXT) // 2
    with monkeypatch.context() as patch:
        patch.setattr(sources, "_sha256", never)
        for other in (TEXT + "x", TEXT[:middle] + "#" + TEXT[middle + 1 :]):
            run = run_with("other.txt", other)
            what = "data of 'a' are" if mixed else "training data is"
            with pytest.raises(RequestError, match=f"the {what} not what the run in .* has seen so far: the size or a"):
                resume(run, facts)
    unseen = TEXT[: middle // 2] + "#" + TEXT[middle // 2 + 1 :]
    with pytest.raises(RequestError, match=r"has seen so far \(fingerprint"):
        resume(run_with("other.txt", unseen), facts)


def test_a_run_goes_on_with_the_packing_that_it_began_with_alone(resume, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    path, tokenizer = tmp_path / "tokens.bin", save_tokenizer(tmp_path / "t.json", 63, end="</s>")
    write(path, np.arange(400) % 64)
    before = run_on(path, tokenizer=tokenizer, pack="best-fit")
    with jax.set_mesh(before.mesh):
        facts = save_policy_of(before, None, NoBase()).facts(5)
    with pytest.raises(WentOn):
        resume(run_on(path, tokenizer=tokenizer, pack="best-fit"), facts)
    with pytest.raises(RequestError, match=r"the training data is not what the run in .* has seen so far"):
        resume(run_on(path, tokenizer=tokenizer), facts)


# ---- a validation that was stopped


class Played(trainer.Trainer):
    """The loop of a run of 12 steps, without its program: validations are noted, and no step does anything."""

    def __init__(self, folder: RunFolder, every: int, first: int = 0, stopped: bool = False):
        self.validated: list[int] = []
        stop = SimpleNamespace(due=lambda: False, here=lambda: stopped)
        super().__init__(
            first=first,
            steps=12,
            every=1,
            start=lambda: SimpleNamespace(params=None, variables=None),
            batch_after=lambda step: None,
            prefetch=2,
            runner=SimpleNamespace(drain=lambda step, state: state, program=None, unfinished=""),
            meter=SimpleNamespace(catch_up=idle, next=next, paused=contextlib.nullcontext, restart=idle),
            log=SimpleNamespace(metrics=lambda values: self.validated.append(values["step"])),
            profile=contextlib.nullcontext(),
            validation=trainer.Validation(every, lambda state, enough: None if enough() else {"loss": 1.0}),
            save_policy=SimpleNamespace(due=lambda steps: False, save_if_best=lambda step, state, loss: None),
            check_lock=idle,
            folder=folder,
            job=SimpleNamespace(stop=stop, note=lambda *_: None),
        )

    def compile(self, state):
        return None

    def step(self, step, state, batch):
        return state

    def finish(self, *_):
        pass


def idle() -> None:
    """Do nothing."""


@pytest.fixture
def played(tmp_path):
    """The validations of a run that goes on from step `first` in a folder whose metrics are these."""

    def call(first: int, every: int, metrics: list[dict]) -> list[int]:
        folder = RunFolder(tmp_path)
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in metrics))
        run = Played(folder, every, first)
        assert run.train() == trainer.DONE
        return run.validated

    return call


TRAINED = [{"step": step, "loss": 2.0} for step in range(1, 9)]


def validated(*steps: int) -> list[dict]:
    return TRAINED + [{"step": step, "validation_loss": 1.5} for step in steps]


@pytest.mark.parametrize(
    ("first", "every", "metrics", "wanted"),
    [
        pytest.param(8, 4, validated(4), [8, 12], id="stopped in it"),
        pytest.param(8, 4, validated(4, 8), [12], id="made before"),
        pytest.param(8, 4, TRAINED, [8, 12], id="none was made"),
        pytest.param(7, 4, validated(4), [8, 12], id="not due yet"),
        pytest.param(8, 0, TRAINED, [12], id="only at the end"),
        pytest.param(0, 4, [], [4, 8, 12], id="a new run"),
    ],
)
def test_a_validation_that_was_stopped_is_made_up_for(played, first, every, metrics, wanted):
    """Of the step that the run goes on from: its parameters are there no more after the next one."""
    assert played(first, every, metrics) == wanted


@pytest.mark.parametrize(("step", "wanted"), [(8, []), (12, [12])])
def test_a_stop_ends_a_validation_but_the_last_and_leaves_no_line(tmp_path, step, wanted):
    """A line of half a validation would be taken for the whole one."""
    run = Played(RunFolder(tmp_path), every=4, stopped=True)
    run.validate(step, run.start())
    assert run.validated == wanted
