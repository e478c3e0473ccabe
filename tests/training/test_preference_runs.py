"""Runs on pairs of answers: what they report, killed and resumed, with a reference that is kept or in each step."""

import re
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxdist import evaluate, train
from jaxdist.config import Config, ModelConfig, RequestError, TrainConfig
from jaxdist.data.batches import BatchLayout
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.planning.timing import flops_per_token
from jaxdist.request import load
from jaxdist.sharding import Layout
from jaxdist.training import reference
from jaxdist.training.forward.objective import REFERENCE
from jaxdist.training.task_text import PreferenceTask
from jaxdist.weights.source import Stored
from tests.data.chats.made import json_lines, tokenizer_folder
from tests.training.conftest import over
from tests.training.curves import lines, without_times
from tests.training.test_resume import saved

FIGURES = ("accuracy", "reward_margin", "chosen_logp", "rejected_logp")


def pairs() -> list[dict]:
    rows = []
    for number in range(60):
        ask = {"role": "user", "content": f"{number}?"}
        answers = {"chosen": f"{number}.", "rejected": f"{number} of the mesh"}
        rows.append({key: [ask, {"role": "assistant", "content": text}] for key, text in answers.items()})
    return rows


def task(rows: int, batch: int, **knobs) -> PreferenceTask:
    """A task of so many rows, of which nothing is read."""
    found = PreferenceTask.__new__(PreferenceTask)
    found.config = Config(train=TrainConfig(objective="dpo", global_batch_size=batch, **knobs))
    found.rows = rows
    return found


def test_each_step_has_both_rows_of_its_pairs_side_by_side_and_an_epoch_has_all():
    steps = [task(24, 6).rows_after(step).reshape(-1, 2) for step in range(4)]
    for pairs_of_step in steps:
        assert (pairs_of_step[:, 0] % 2 == 0).all()
        assert (pairs_of_step[:, 1] == pairs_of_step[:, 0] + 1).all()
    drawn = np.concatenate(steps).ravel()
    assert sorted(drawn) == list(range(24))
    assert list(drawn) != list(range(24))
    assert not np.array_equal(task(24, 6, seed=1).rows_after(0), steps[0].ravel())


def test_a_reference_is_of_its_row_and_of_none_for_padding():
    """On its way into a batch, whose tokens a mesh may reorder."""
    mesh = make_mesh(parse_mesh("context=2"), jax.devices()[:2])
    config = Config(mesh="context=2", model=ModelConfig(sequence=8), train=TrainConfig(objective="dpo"))
    layout = Layout.of(Split(config, parse_mesh("context=2")), mesh)
    found = task(8, 4)
    found.config = config
    found.layout = layout
    found.reference = {"validation": np.arange(8, dtype=np.float32) - 9}

    class Rows:
        apart = False

        def read(self, numbers):
            return dict.fromkeys(("tokens", "labels"), np.tile(np.arange(8, dtype=np.int32), (numbers.size, 1)))

    found.data = SimpleNamespace(validation=Rows())
    with jax.set_mesh(mesh):
        batch = found.held_out(np.array([4, 5, -1, -1]), BatchLayout(1, mesh, layout))
    np.testing.assert_array_equal(batch[REFERENCE], [[-5, -4, 0, 0]])


def test_a_reference_is_of_the_weights_that_the_leader_finds_written_down(tmp_path, monkeypatch):
    """On its way to the others a new file may be late, and these would look at the weights alone, and wait."""
    run = SimpleNamespace(config=SimpleNamespace(folder=tmp_path))
    assert reference._recorded(run) is None
    monkeypatch.setattr(reference, "from_all", lambda found: ["as the leader says", found])
    assert reference._recorded(run) == "as the leader says"


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Options of a small run on pairs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pairs.jsonl").write_text(json_lines(pairs()))
    tokenizer_folder(tmp_path / "tokenizer")
    return [
        "--data.path=pairs.jsonl", "--data.tokenizer=tokenizer", "--train.objective=dpo", "--model.family=llama",
        "--model.layers=2", "--model.embed=16", "--model.heads=2", "--model.vocab=330", "--model.sequence=32",
        "--train.global-batch-size=8", "--train.steps=4", "--log.every=1", "--optimizer.warmup=0",
        "--log.tensorboard=false", "--precision=float32", "--checkpoint.every=2", "--validation.every=2",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_run_on_pairs_goes_on_to_the_bit_with_the_reference_that_it_began_with(asked, tmp_path, capsys):
    asked += ["--mesh=2x1x1"]
    assert train.main([*asked, "--run-dir=straight"]) == 0
    said = capsys.readouterr().err
    assert "reference   computing" in said
    assert "validation loss" in said
    assert "nats per pair; loss of the reference of the held-out part 0.6931" in said

    first, *_ = steps = lines(tmp_path / "straight")
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["reward_margin"] == pytest.approx(0, abs=1e-6)
    assert all(name in line for line in steps for name in FIGURES if "loss" in line)
    validated = [line for line in steps if "validation_loss" in line]
    assert all(f"validation_{name}" in line for line in validated for name in FIGURES)
    assert validated[-1]["validation_reward_margin"] > 0.001
    assert validated[-1]["validation_loss"] < np.log(2)

    for name in ("continued", "without-cache"):
        shutil.copytree("straight", name)
        shutil.rmtree(f"{name}/checkpoints/4")
    assert train.main([*asked, "--run-dir=continued"]) == 0
    said = capsys.readouterr().err
    assert "from the checkpoint of step 2" in said
    assert "reference   computing" not in said
    # What is gone is computed again, from the weights that the run began with.
    shutil.rmtree(tmp_path / "cache")
    assert train.main([*asked, "--run-dir=without-cache"]) == 0
    assert "reference   computing" in capsys.readouterr().err
    for name in ("continued", "without-cache"):
        folders = (tmp_path / name, tmp_path / "straight")
        jax.tree.map(np.testing.assert_array_equal, *(saved(folder, 4) for folder in folders))
        assert without_times(folders[0]) == without_times(folders[1])

    assert evaluate.main(["straight"]) == 0
    said = capsys.readouterr().out
    assert "nats per pair" in said
    assert "reward_margin 0." in said
    assert "accuracy" in said


@pytest.mark.exhaustive
def test_a_reference_stays_when_the_weights_that_it_is_of_are_replaced(asked, tmp_path, capsys, monkeypatch):
    """It is in the cache; where it is not, the run does not go on with another one."""
    asked = over(asked, "--train.steps=2", "--checkpoint.every=1")
    base = over(asked, "--train.steps=1", "--run-dir=base", "--validation.every=0")
    assert train.main(base) == 0
    tuned = [*asked, "--init-from=base"]
    assert train.main([*tuned, "--run-dir=straight"]) == 0
    for name in ("continued", "refused"):
        shutil.copytree("straight", name)
        shutil.rmtree(f"{name}/checkpoints/2")
    shutil.rmtree("base")
    assert train.main(over(base, "--train.seed=1")) == 0

    capsys.readouterr()
    assert train.main([*tuned, "--run-dir=continued"]) == 0
    assert "reference   computing" not in capsys.readouterr().err
    folders = tmp_path / "continued", tmp_path / "straight"
    jax.tree.map(np.testing.assert_array_equal, *(saved(folder, 2) for folder in folders))
    # What the cache has needs no weights.
    with monkeypatch.context() as patch:
        patch.setattr(Stored, "lasting", lambda source: pytest.fail("the weights were read"))
        assert evaluate.main(["straight"]) == 0
    shutil.rmtree(tmp_path / "cache")
    for command in (lambda: train.main([*tuned, "--run-dir=refused"]), lambda: evaluate.main(["straight"])):
        with pytest.raises(RequestError, match=r"\(init_from base\) are not what they were"):
            command()


@pytest.mark.exhaustive
def test_adapters_refer_to_the_base_beside_them_in_a_pipeline(asked, tmp_path, capsys):
    asked = over(asked, "--validation.every=0", "--checkpoint.every=0")
    # The base learns from the same pairs without a reference.
    assert train.main(over(asked, "--run-dir=base", "--train.steps=1", "--train.objective=orpo")) == 0
    said = capsys.readouterr().err
    assert "reference" not in said
    figures, *_ = lines(tmp_path / "base")
    even = np.log(330) + 0.1 * np.log(2)
    assert figures["loss"] == pytest.approx(even, rel=0.02)
    assert figures["loss"] == pytest.approx(-figures["chosen_logp"] + 0.1 * np.log(2), rel=0.01)
    assert abs(figures["reward_margin"]) < 0.5
    more = [
        "--init-from=base",
        "--model.lora-rank=2",
        "--mesh=1x1x2",
        "--pipeline.microbatches=2",
        "--optimizer.learning-rate=0.05",
    ]
    assert train.main([*asked, *more, "--run-dir=adapters"]) == 0
    said = capsys.readouterr().err
    assert "reference   computing" not in said
    figures = [line for line in lines(tmp_path / "adapters") if "loss" in line]
    assert figures[0]["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert figures[-1]["loss"] < figures[0]["loss"] - 0.001
    assert figures[-1]["reward_margin"] > 0.001
    # Each step computes the reference too: the tables and matrices forward, and attention.
    model = load("adapters/config.toml", {}).model
    forward = 2 * (model.vocab * 16 + 2 * (4 * 16**2 + 3 * 16 * model.split_width)) + 2 * 2 * 32 * 16
    (counted,) = re.findall(r"arithmetic +([\d,]+) FLOPs per token = .* \+ ([\d,]+) of the reference", said)
    assert int(counted[1].replace(",", "")) == forward
    assert int(counted[0].replace(",", "")) == flops_per_token(model) + forward
    assert evaluate.main(["adapters"]) == 0
