"""Runs on a mixture: the rows of each step, on any mesh."""

import jax
import numpy as np
import pytest

from jaxdist.config import Config
from jaxdist.data.mixture import Mixture, Phase
from jaxdist.data.order import global_rows
from jaxdist.data.tokens import TokenWriter
from jaxdist.training.run import Run
from tests.training.curves import close, lines

BATCH = 8
MODEL = dict(layers=1, embed=16, heads=2, vocab=300, sequence=8)
LENGTHS = {"a": 3000, "b": 900, "c": 500}


@pytest.fixture
def sources(tmp_path):
    """Tokens that tell whose they are: those of `a` begin at 0, of `b` at 100, of `c` at 200."""
    for place, (name, length) in enumerate(LENGTHS.items()):
        with TokenWriter(tmp_path / f"{name}.bin", "uint16") as writer:
            writer.write(100 * place + np.arange(length) % 97)
    return {name: str(tmp_path / f"{name}.bin") for name in LENGTHS}


def table(sources, weights, *phases):
    mixture = {name: {"path": path, "weight": weights.get(name, 0)} for name, path in sources.items()}
    return {**mixture, "phase": list(phases)} if phases else mixture


def run_on(steps=100, mesh="1x1x1", **data) -> Run:
    config = Config(mesh=mesh, model=MODEL, data=data, train=dict(global_batch_size=BATCH, steps=steps, seed=3))
    return Run(config, devices=jax.devices()[: np.prod([int(n) for n in mesh.split("x")])])


def test_steps_have_the_rows_of_the_mixture(sources):
    """Against the pure function of rows and sizes; the tokens are those of the source."""
    later = {"from": 0.9, "b": 1, "c": 1}
    run = run_on(mixture=table(sources, {"a": 0.7, "b": 0.3}, later))
    parts = {name: corpus.train for name, corpus in run.task.data.sources.items()}
    plain = Mixture(
        3,
        {name: part.count for name, part in parts.items()},
        [Phase(0, {"a": 0.7, "b": 0.3}), Phase(90 * BATCH, {"b": 1, "c": 1})],
    )
    for step in (0, 1, 89, 90, 99):
        whose, rows = plain.rows(np.arange(step * BATCH, (step + 1) * BATCH))
        batch = run.task.batch_after(step)
        tokens = np.asarray(batch["tokens"]).reshape(BATCH, -1)
        assert (tokens // 100 == whose[:, None]).all()
        wanted = [parts[plain.names[place]].read(np.array([row])) for place, row in zip(whose, rows, strict=True)]
        assert np.array_equal(tokens, np.concatenate([one["tokens"] for one in wanted]))
    first = np.concatenate([run.task.rows_after(step) for step in range(90)])
    assert np.bincount(np.searchsorted(run.task.data.train.firsts, first, "right") - 1, minlength=3)[2] == 0


def test_a_single_source_keeps_its_order(sources):
    run = run_on(path=sources["a"])
    for step in (0, 5, 77):
        assert np.array_equal(run.task.rows_after(step), global_rows(3, step, BATCH, run.task.rows))


def test_micro_batches_and_meshes_have_the_same_rows(sources):
    mixture = table(sources, {"a": 0.5, "b": 0.3, "c": 0.2})
    wanted = np.asarray(run_on(mixture=mixture).task.batch_after(7)["tokens"]).reshape(BATCH, -1)
    for mesh in ("4x1x1", "2x2x1"):
        found = np.asarray(run_on(mixture=mixture, mesh=mesh).task.batch_after(7)["tokens"])
        assert np.array_equal(found.reshape(BATCH, -1), wanted)


def test_the_summary_has_a_line_for_each_source(sources):
    run = run_on(mixture=table(sources, {"a": 0.7, "b": 0.3}, {"from": 125, "c": 1}), steps=250)
    (name, first), *rest = run.task.about_data()
    assert (name, first) == ("data", "3 sources")
    lines = [text for name, text in rest if name == ""]
    assert lines[0].endswith("a.bin, 2.9 k tokens and 150 held out: 35 % of the rows, 1.97 epochs")
    assert lines[2].endswith("c.bin, 475 tokens and 25 held out: 50 % of the rows, 16.95 epochs")
    assert [text for name, text in rest if name == "warning"] == [
        "'c' is read 16.9 times in this run, and repeated data teach less and less above 4 times; lower its weight, or "
        "give more of it"
    ]


@pytest.mark.slow
def test_losses_are_those_of_one_device_on_another_mesh(run, sources):
    """With micro-batches and batches that are made ahead."""
    text = ",".join(f"{path}*{weight}" for path, weight in zip(sources.values(), (0.5, 0.3, 0.2), strict=True))
    options = [f"--data.path={text}", "--train.steps=6", "--validation.every=3", "--validation.batches=0"]
    one, other = (
        run(name, *options, *mesh)
        for name, mesh in {
            "one": ["--mesh=1x1x1"],
            "four": ["--mesh=2x2x1", "--train.accumulation=2", "--data.prefetch=5"],
        }.items()
    )
    close(lines(one), lines(other))
