"""Runs on a mixture: the rows of each step, on any mesh."""

import json
import shutil
from collections import Counter

import jax
import numpy as np
import pytest

from jaxdist import train
from jaxdist.config import Config, RequestError
from jaxdist.data.mixing.mixture import WINDOW, Mixture, Phase, _seed_of
from jaxdist.data.mixing.phases import continued, same_phases
from jaxdist.data.order import global_rows, permute
from jaxdist.data.tokens import TokenWriter
from jaxdist.training import plots
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.engine import Means
from jaxdist.training.entering import enter
from jaxdist.training.metrics import _validation_line
from jaxdist.training.mixture_record import MixtureRecord
from jaxdist.training.run import Run
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.validation import losses_of_sources
from tests.data.files import save_tokenizer
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
    assert lines[2].startswith("c is ")
    assert lines[2].endswith("c.bin, 475 tokens and 25 held out: 50 % of the rows, 16.95 epochs")
    assert lines[3] == "a 70 %, b 30 %; after 125 steps c 100 %"
    assert [text for name, text in rest if name == "warning"] == [
        "'c' is read 16.9 times in this run, and repeated data teach less and less above 4 times; lower its weight, or "
        "give more of it"
    ]


def test_the_summary_says_what_rows_cut_of_all_that_is_read(tmp_path, monkeypatch):
    """Short documents of `a`, and long ones of `b`, each as often as it is read."""
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    end = save_tokenizer(tmp_path / "tokenizer.json", 299, end="</s>")
    for name, length, count in (("a", 10, 100), ("b", 100, 80)):
        with TokenWriter(tmp_path / f"{name}.bin", "uint16") as writer:
            writer.write(np.tile(np.r_[np.full(length - 1, 5), 299], count))
    mixture = table({name: str(tmp_path / f"{name}.bin") for name in "ab"}, {"a": 0.2, "b": 0.8})
    config = dict(
        mesh="1x1x1", data=dict(mixture=mixture, tokenizer=end), train=dict(global_batch_size=BATCH, steps=36)
    )
    run = Run(Config(model=MODEL | {"sequence": 32}, **config), devices=jax.devices()[:1])
    epochs = run.task.mixture.rows_before(36 * BATCH) / run.task.mixture.sizes
    short, long = (run.task.data.sources[name].cut for name in "ab")
    assert (short.longer, long.cut) == (0, long.documents)
    cut = epochs[0] * short.cut + epochs[1] * long.documents
    documents = epochs[0] * short.documents + epochs[1] * long.documents
    whole = 100 * epochs[1] * long.documents / documents
    told = f"; rows cut {100 * cut / documents:.1f} % of the documents (with data.pack best-fit: {whole:.1f} %)"
    assert run.task.about_data()[0][1].endswith(told)


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
    plots.plot_loss(
        tmp_path / "metrics.jsonl", tmp_path / "loss.png", {"nats": 1.0, "name": "unigram entropy", "unit": "token"}
    )
    _, labels = drawn[0].get_legend_handles_labels()
    of_sources = [f"validation loss of {name}" for name in "abcdefgh"]
    assert labels == ["validation loss", *of_sources, "unigram entropy of the held-out part"]
    assert drawn[0].lines[2].get_ydata().tolist() == [2.1, 2.1]


def test_any_name_of_a_source_is_drawn(tmp_path, recwarn):
    """One that would be a formula, and one that the font lacks, in a folder that would be a formula."""
    folder = tmp_path / "$\\x$"
    folder.mkdir()
    values = {"step": 1, "validation_loss": 2.0, "validation_loss/$\\foo$": 2.0, "validation_loss/\u65e5": 2.0}
    (folder / "metrics.jsonl").write_text(json.dumps(values))
    plots.plot_loss(
        folder / "metrics.jsonl", folder / "loss.png", {"nats": 1.0, "name": "unigram entropy", "unit": "token"}
    )
    assert (folder / "loss.png").stat().st_size > 0
    assert not recwarn.list


# ---- going on


OLD = {"a": 0.7, "b": 0.3}
NEW = {"a": 0.2, "b": 0.3, "c": 0.5}
SIZES = {"a": 300, "b": 100, "c": 40}


def names_of(mixture, rows):
    source, row = mixture.rows(np.arange(rows))
    return [mixture.names[place] for place in source], row


@pytest.mark.parametrize("changed_at", [1, 777, 1000, 2500])
def test_rows_after_a_change_are_those_of_a_plain_simulation(changed_at):
    """Rows before stay. Those after have the new shares, and go on in each source where it was, in epoch and place."""
    phases = continued([Phase(0, OLD)], [Phase(0, NEW)], changed_at)
    rows = changed_at + 3 * WINDOW
    names, found = names_of(Mixture(3, SIZES, phases), rows)
    before, rows_before = names_of(Mixture(3, SIZES, [Phase(0, OLD)]), changed_at)
    assert (names[:changed_at], found[:changed_at].tolist()) == (before, rows_before.tolist())
    for start in range(changed_at, rows, WINDOW):
        counts = Counter(names[start : start + WINDOW])
        assert all(abs(counts[name] - WINDOW * weight) <= 1 for name, weight in NEW.items())
    seen = Counter()
    for name, row in zip(names, found.tolist(), strict=True):
        epoch, place = divmod(seen[name], SIZES[name])
        assert row == permute(int(_seed_of(3, name)), epoch, SIZES[name], np.array([place]))[0]
        seen[name] += 1


def test_a_change_replaces_the_phases_to_come_alone():
    there = [Phase(0, {"a": 1}), Phase(50, {"b": 1}), Phase(90, {"a": 1, "b": 1})]
    starts = lambda phases: [(phase.start, phase.weights) for phase in phases]
    asked = [Phase(0, {"a": 2}), Phase(60, {"b": 1, "c": 1})]
    assert starts(continued(there, asked, 70)) == [*starts(there[:2]), (70, {"b": 1, "c": 1})]
    assert starts(continued(there, asked, 50)) == [(0, {"a": 1}), (60, {"b": 1, "c": 1})]
    assert starts(continued(there, asked, 55)) == [*starts(there[:2]), (55, {"a": 2}), (60, {"b": 1, "c": 1})]
    assert starts(continued(there, there, 20)) == starts(there)
    assert same_phases([Phase(0, {"a": 7, "b": 3})], [Phase(0, {"b": 0.3, "a": 0.7, "c": 0})])
    assert not same_phases([Phase(0, {"a": 1})], [Phase(8, {"a": 1})])


def saved(run, step):
    """The facts of the run's data that a checkpoint keeps, as JSON gives them back."""
    return json.loads(json.dumps({"step": step, "data": run.task.fingerprint, **run.task.facts()}))


def order(run, steps=range(0, 100, 9)):
    return [run.task.rows_after(step).tolist() for step in steps]


def gone_on(facts, steps=100, **data):
    run = run_on(steps, **data)
    run.task.go_on("runs/x", facts)
    return run


def test_a_run_goes_on_with_its_mixture(sources):
    mixture = table(sources, OLD, {"from": 0.5, "c": 1})
    first = run_on(mixture=mixture)
    again = gone_on(
        saved(first, 30), mixture={**mixture, "a": {**mixture["a"], "weight": 7}, "b": {**mixture["b"], "weight": 3}}
    )
    assert order(again) == order(first)


def test_another_mixture_is_refused_with_both_or_taken_from_there_on(sources):
    first = run_on(mixture=table(sources, {**OLD, "c": 0.1}))
    asked = table(sources, NEW)
    with pytest.raises(RequestError) as error:
        gone_on(saved(first, 40), mixture=asked)
    assert error.value.problems == [
        "run folder runs/x holds a run with another mixture (a 63.64 %, b 27.27 %, c 9.091 % there, c 50 %, b 30 %, "
        "a 20 % here); ask for the same, or change it from here on with --data.changed true"
    ]
    changed = gone_on(saved(first, 40), mixture=asked, changed=True)
    assert order(changed, range(40)) == order(first, range(40))
    assert order(changed, range(40, 60)) != order(first, range(40, 60))
    # The next time nobody has to allow it, from before or after the next checkpoint.
    assert order(gone_on(saved(changed, 55), mixture=asked)) == order(changed)
    assert order(gone_on(saved(first, 40), mixture=asked, changed=True)) == order(changed)
    # Back to a step before the change, with the first mixture.
    assert order(gone_on(saved(first, 20), mixture=table(sources, {**OLD, "c": 0.1}))) == order(first)
    with pytest.raises(RequestError, match="holds a run with another mixture"):
        gone_on(saved(changed, 55), mixture=table(sources, {**OLD, "c": 0.1}))


def test_a_source_may_be_added_or_left_out(sources):
    two = {name: sources[name] for name in ("a", "b")}
    first = run_on(mixture=table(two, OLD))
    added = gone_on(saved(first, 40), mixture=table(sources, NEW), changed=True)
    parts = lambda run, steps: [
        np.searchsorted(run.task.data.train.firsts, rows, "right") - 1 for rows in order(run, steps)
    ]
    assert np.array_equal(parts(added, range(40)), parts(first, range(40)))
    assert 2 in np.concatenate(parts(added, range(40, 80)))
    without = gone_on(
        saved(added, 70), mixture=table({name: sources[name] for name in ("b", "c")}, {"b": 1, "c": 1}), changed=True
    )
    assert set(np.concatenate(parts(without, range(70, 100))).tolist()) == {0, 1}
    assert [name for name, _ in without.task.about_data()] == ["data", "", "", "", "warning"]
    assert without.task.mixture.rows_before(70 * BATCH).tolist() == added.task.mixture.rows_before(70 * BATCH).tolist()


def test_other_data_under_the_same_name_are_refused(sources, tmp_path):
    first = run_on(mixture=table(sources, NEW))
    moved = {name: str(shutil.copy(path, tmp_path / f"moved-{name}.bin")) for name, path in sources.items()}
    assert order(gone_on(saved(first, 40), mixture=table(moved, NEW))) == order(first)
    with TokenWriter(tmp_path / "other.bin", "uint16") as writer:
        writer.write(np.arange(900) % 98)
    with pytest.raises(RequestError, match=r"the data of 'b' are not what the run in runs/x has seen .*fingerprint"):
        gone_on(saved(first, 40), mixture=table({**moved, "b": str(tmp_path / "other.bin")}, NEW), changed=True)
    both = table({**moved, "a": str(tmp_path / "other.bin"), "b": moved["a"]}, NEW)
    with pytest.raises(
        RequestError, match=r"the data of 'a' \(and 1 more, perhaps because one tokenizer was trained on "
    ):
        gone_on(saved(first, 40), mixture=both)


def test_a_longer_run_moves_phases_that_begin_at_a_part_of_it(sources):
    mixture = table(sources, OLD, {"from": 0.5, "c": 1})
    first = run_on(mixture=mixture)
    told = r"after 50 steps c 100 % there, .*after 100 steps c 100 % here.* from = 50, or"
    with pytest.raises(RequestError, match=told):
        gone_on(saved(first, 30), 200, mixture=mixture)
    as_before = gone_on(saved(first, 30), 200, mixture=table(sources, OLD, {"from": 50, "c": 1}))
    assert order(as_before, range(100)) == order(first, range(100))
    longer = gone_on(saved(first, 30), 200, mixture=mixture, changed=True)
    assert order(longer, range(50)) == order(first, range(50))
    assert [phase.start for phase in longer.task.record.phases] == [0, 100 * BATCH]


def test_a_mixture_and_a_single_source_are_other_data(sources):
    mixed, single = run_on(mixture=table(sources, NEW)), run_on(path=sources["a"])
    for one, other in ((mixed, single), (single, mixed)):
        with pytest.raises(RequestError, match="the training data is not what the run in runs/x has seen so far"):
            one.task.go_on("runs/x", saved(other, 5))


def test_a_record_that_is_damaged_is_refused():
    for damaged in (
        [],
        {"asked": 3},
        {"asked": [{"row": "x", "weights": {}}], "phases": [], "rows": {}, "fingerprints": {}},
    ):
        with pytest.raises(RequestError, match="what the checkpoint keeps of the mixture cannot be read"):
            MixtureRecord.of({"mixture": damaged})


def test_a_run_that_begins_has_no_mixture_to_change(sources, tmp_path):
    folder = RunFolder(tmp_path / "run")
    data = dict(mixture=table(sources, NEW), changed=True)
    enter(folder, Config(run_dir=tmp_path / "run", data=data))
    assert folder.notes == ["data.changed is true, and the run begins here: its mixture is the first one"]


# ---- whole runs


def short(sources, *weights):
    return "--data.path=" + ",".join(
        f"{path}*{weight}" for path, weight in zip(sources.values(), weights, strict=False)
    )


@pytest.mark.slow
def test_losses_are_those_of_one_device_on_another_mesh(run, sources):
    """With micro-batches and batches that are made ahead."""
    options = [short(sources, 0.5, 0.3, 0.2), "--train.steps=6", "--validation.every=3", "--validation.batches=0"]
    one, other = (
        run(name, *options, *mesh)
        for name, mesh in {
            "one": ["--mesh=1x1x1"],
            "four": ["--mesh=2x2x1", "--train.accumulation=2", "--data.prefetch=5"],
        }.items()
    )
    close(lines(one), lines(other))


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_with_other_weights(sources, killed, request_of, capsys):
    """From the last checkpoint on; the tables are compared before any data are read."""
    folder = killed("run", 7, 5, short(sources, 0.5, 0.5))
    other = short(sources, 0.1, 0.3, 0.6)
    with pytest.raises(RequestError, match=r"another mixture \(.*a.bin 50 %, .*b.bin 50 % there, .*c.bin 60 %"):
        train.main(request_of("run", other))
    capsys.readouterr()
    assert train.main(request_of("run", other, "--data.changed=true")) == 0
    assert "changed = false" in (folder / "config.toml").read_text()
    facts = StepDir(folder / "checkpoints").facts(20)["mixture"]
    assert [phase["row"] for phase in facts["phases"]] == [0, 5 * 8]
    assert train.main(request_of("run", other)) == 0  # it is finished, and nothing is refused
