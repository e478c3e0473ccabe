"""Runs on a mixture: the rows of each step, on any mesh."""

import json

import jax
import numpy as np
import pytest

from jaxdist.config import Config
from jaxdist.data.mixture import Mixture, Phase
from jaxdist.data.order import global_rows
from jaxdist.data.tokens import TokenWriter
from jaxdist.training import plots
from jaxdist.training.engine import Means
from jaxdist.training.metrics import _validation_line
from jaxdist.training.run import Run
from jaxdist.training.validation import losses_of_sources
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


class Told:
    """Stands for the programs of a run: the loss of a batch is the number of its row, in its mean over real rows."""

    def measure(self, params, variables, batches, enough):
        found = []
        for batch in batches:
            if enough():
                return None
            found.append((np.asarray(batch["tokens"]), np.asarray(batch["labels"]) >= 0))
        counts = sum(counted.sum() for _, counted in found)
        loss = sum((tokens * counted).sum() for tokens, counted in found) / counts
        return Means({"loss": float(loss)}, int(counts), len(found))


def test_validation_gives_the_loss_of_each_source_and_of_all_tokens(sources, monkeypatch):
    """Here the loss of a token is its id, so that the true means are known."""
    run = run_on(mixture=table(sources, {"a": 1, "b": 1, "c": 1}), validation_fraction=0.2)
    monkeypatch.setattr(type(run), "engine", Told())
    whole = run.validate({}, {}, 0)
    held_out = {name: corpus.validation for name, corpus in run.task.data.sources.items()}
    ids = {name: rows.read(np.arange(rows.count))["tokens"] for name, rows in held_out.items()}
    for name, tokens in ids.items():
        assert whole[f"loss/{name}"] == pytest.approx(tokens.mean())
    together = np.concatenate([tokens.ravel() for tokens in ids.values()])
    assert (whole["loss"], whole["tokens"]) == (pytest.approx(together.mean()), together.size)

    few = run.validate({}, {}, 3)
    rows = {name: part.count for name, part in held_out.items()}
    assert list(rows.values()) == [74, 22, 12]
    assert few["batches"] == 2 + 1 + 1
    assert few["loss/c"] == pytest.approx(ids["c"][:BATCH].mean())
    weighed = sum(few[f"loss/{name}"] * count for name, count in rows.items()) / sum(rows.values())
    assert few["loss"] == pytest.approx(weighed)
    assert run.validate({}, {}, 0, enough=lambda: True) is None


def test_validation_of_a_single_source_has_no_loss_by_name(sources, monkeypatch):
    run = run_on(path=sources["a"])
    monkeypatch.setattr(type(run), "engine", Told())
    assert run.validate({}, {}, 0).keys() == {"loss", "batches", "tokens"}


def test_a_rolling_loss_is_that_of_each_source_too(sources, monkeypatch):
    run = run_on(mixture=table(sources, {"a": 1, "b": 1, "c": 1}), validation_fraction=0.2)
    monkeypatch.setattr(type(run), "engine", Told())
    found = run.measure_parts({}, {}, run.task.rolling_parts(4))
    lengths = [corpus.validation.tokens.length for corpus in run.task.data.sources.values()]
    assert found["tokens"] == sum(lengths) - len(lengths)  # nothing predicts the first one of a source
    assert found.keys() == {"loss", "batches", "tokens", "loss/a", "loss/b", "loss/c"}


def test_losses_of_sources_are_told_and_drawn(tmp_path, monkeypatch):
    values = {"validation_loss": 2.5, "validation_batches": 3}
    values |= {f"validation_loss/{name}": 2 + place / 10 for place, name in enumerate("abcdefghij")}
    line = _validation_line({"step": 7, **values})
    assert line.startswith("step 7  validation loss 2.5000 over 3 batches  (a 2.0000, b 2.1000, ")
    assert line.endswith("h 2.7000, 2 more in metrics.jsonl)")
    assert losses_of_sources({"validation_loss/a": None}, "validation_").keys() == {"a"}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **values}) + "\n" for step in (5, 9)))
    drawn = []
    monkeypatch.setattr(plots, "write_picture", lambda path, figure, dpi: drawn.append(figure.axes[0]))
    plots.plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", 1.0, "unigram entropy", "token")
    _, labels = drawn[0].get_legend_handles_labels()
    of_sources = [f"validation loss of {name}" for name in "abcdefgh"]
    assert labels == ["validation loss", *of_sources, "unigram entropy of the held-out part"]
    assert drawn[0].lines[2].get_ydata().tolist() == [2.1, 2.1]
