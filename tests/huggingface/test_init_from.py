"""`--init-from FOLDER` gives a request its model and its tokenizer, and refuses what differs. No weight is read."""

import json
import re
import shutil
from pathlib import Path

import pytest

from jaxdist import checkpoints, evaluate, explain, generate, plan, train
from jaxdist.config import RequestError
from jaxdist.doctor import __main__ as doctor
from jaxdist.process.exit_codes import REFUSED
from jaxdist.request import arguments, load, to_toml
from jaxdist.request.commandline import outcome
from jaxdist.request.pretrained import as_asked
from tests.huggingface import configs
from tests.huggingface.configs import small
from tests.huggingface.test_model_config import OTHER_VALUES

GOLDEN = Path(__file__).parent / "golden"
LLAMA = GOLDEN / "llama31"


def refusal(config, overrides):
    with pytest.raises(RequestError) as refused:
        load(config, overrides)
    return refused.value.problems


def folder_of(tmp_path, config, tokenizer=True):
    """A folder with this config.json and, by default, a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if tokenizer:
        shutil.copy(LLAMA / "tokenizer.json", folder)
    return folder


def test_the_folder_gives_the_model_and_the_tokenizer():
    config = load(None, {"init_from": str(LLAMA)})
    model = config.model
    assert (model.family, model.layers, model.embed, model.heads, model.kv_heads) == ("llama", 2, 64, 8, 2)
    assert (model.rope_theta, model.rope_scaling, model.tied) == (5e5, "llama3,factor=8,original=16", False)
    assert config.init_from == LLAMA
    assert config.data.tokenizer == LLAMA
    assert config.folder == Path("runs/llama31")


def test_a_folder_as_config_is_the_same_as_init_from():
    assert load(str(LLAMA), {}) == load(None, {"init_from": str(LLAMA)})


def test_a_config_beside_the_folder_keeps_its_name_and_its_own_knobs(tmp_path):
    path = tmp_path / "tune.toml"
    path.write_text("[optimizer]\nlearning_rate = 1e-5\n[model]\nlayers = 2\nsequence = 32\n")
    config = load(str(path), {"init_from": str(LLAMA)})
    assert config.folder == Path("runs/tune")
    assert config.optimizer.learning_rate == 1e-5
    assert config.model.sequence == 32
    assert config.model.embed == 64


def test_two_folders_are_refused():
    assert "both give a model" in refusal(str(LLAMA), {"init_from": str(GOLDEN / "qwen3")})[0]


def test_each_value_that_differs_is_refused(tmp_path):
    path = tmp_path / "other.toml"
    path.write_text("[model]\nlayers = 3\nembed = 64\n")
    problems = refusal(str(path), {"init_from": str(LLAMA), "model.tied": "true", "model.window": "8"})
    assert problems == [
        f"model.layers is 3, but the model in '{LLAMA}' has 2; leave it out",
        f"model.window is 8, but the model in '{LLAMA}' has 0; leave it out",
        f"model.tied is True, but the model in '{LLAMA}' has False; leave it out",
    ]


def test_a_knob_that_the_folder_does_not_name_must_keep_its_default():
    problems = refusal(None, {"init_from": str(LLAMA), "model.qkv_bias": "true", "model.qk_norm": "head"})
    assert [problem.split(",")[0] for problem in problems] == ["model.qkv_bias is True", "model.qk_norm is head"]


def test_how_a_run_balances_its_experts_is_up_to_the_run(tmp_path):
    folder = folder_of(tmp_path, small("olmoe", num_experts=8, router_aux_loss_coef=0.01))
    model = load(str(folder), {}).model
    assert (model.balance_rate, model.balance_loss, model.z_loss) == (0, 0.01 * 8 / 2, 0)
    given = {"model.balance_rate": "0.01", "model.balance_loss": "0", "model.z_loss": "1e-3"}
    model = load(str(folder), given | {"model.capacity_factor": "2"}).model
    assert (model.balance_rate, model.balance_loss, model.z_loss, model.capacity_factor) == (0.01, 0, 1e-3, 2)
    problems = refusal(str(folder), {"model.router_renormalize": "true"})
    assert problems == [f"model.router_renormalize is True, but the model in '{folder}' has False; leave it out"]


def test_values_that_are_the_same_are_accepted():
    same = {"model.layers": "2", "model.head_dim": "0", "model.kv_heads": "2", "model.rope_theta": "500000"}
    assert load(None, {"init_from": str(LLAMA), **same}) == load(None, {"init_from": str(LLAMA)})


def test_a_configuration_that_was_written_is_read_again(tmp_path):
    config = load(None, {"init_from": str(LLAMA)})
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load(str(tmp_path / "config.toml"), {}) == config


@pytest.mark.parametrize(("maximum", "expected"), [(64, 64), (1024, 1024), (131072, 1024)])
def test_the_sequence_is_at_most_1024_by_default(tmp_path, maximum, expected):
    folder = folder_of(tmp_path, small("llama", max_position_embeddings=maximum))
    assert load(str(folder), {}).model.sequence == expected


def test_the_maximum_with_its_scaling_is_not_the_default(tmp_path):
    assert load(str(LLAMA), {}).model.sequence == 64


def test_a_sequence_beyond_the_maximum_is_refused(tmp_path):
    folder = folder_of(tmp_path, small("llama"))
    assert load(str(folder), {"model.sequence": "64"}).model.sequence == 64
    assert "model.sequence 65 is more than the 64 tokens" in refusal(str(folder), {"model.sequence": "65"})[0]


def test_a_sequence_that_the_scaling_covers_is_accepted(tmp_path):
    folder = folder_of(tmp_path, small("llama", rope_scaling=dict(type="yarn", factor=4.0)))
    assert load(str(folder), {"model.sequence": "256"}).model.sequence == 256
    assert "is more than the 256 tokens" in refusal(str(folder), {"model.sequence": "257"})[0]


def test_a_table_of_positions_has_the_rows_of_the_folder(tmp_path):
    folder = folder_of(tmp_path, small("gpt2"))
    model = load(str(folder), {"model.sequence": "16"}).model
    assert (model.sequence, model.positions) == (16, 64)
    problems = refusal(str(folder), {"model.sequence": "65"})
    assert len(problems) == 1
    assert "model.positions 64" in problems[0]


@pytest.mark.parametrize("command", [train, plan, explain])
def test_a_published_config_is_read_alone(tmp_path, monkeypatch, command):
    """Every command that takes a model gets it from config.json, without weights and without a tokenizer."""
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path, configs.QWEN_3_06B, tokenizer=False)
    knobs = ("model", "init_from", "mesh") if command is train else command.KNOBS
    config = arguments(["--init-from", "model"], command.__name__.split(".")[-1], "", knobs=knobs).config
    assert (config.model.embed, config.model.head_size, config.model.qk_norm) == (1024, 128, "head")


@pytest.mark.parametrize(("model_type", "key", "value"), OTHER_VALUES)
def test_an_unknown_value_exits_2_and_names_the_key(tmp_path, capsys, model_type, key, value):
    folder = folder_of(tmp_path, small(model_type) | {key: value})
    assert outcome(train.main, [f"--init-from={folder}"]) == REFUSED
    error = capsys.readouterr().err
    assert re.search(rf"jaxdist.train: '?{re.escape(str(folder))}/config.json'?: ", error)
    assert key in error


def test_text_needs_the_tokenizer_of_the_weights(tmp_path):
    folder = folder_of(tmp_path, small("llama"), tokenizer=False)
    problems = refusal(str(folder), {})
    assert len(problems) == 1
    assert "has no tokenizer.json" in problems[0]
    assert load(str(folder), {"data.tokenizer": str(LLAMA)}).data.tokenizer == LLAMA


def test_damage_is_reported_with_the_other_problems(tmp_path):
    folder = folder_of(tmp_path, small("llama", hidden_act="gelu", logit_scale=2.0))
    problems = refusal(str(folder), {"train.steps": "-1"})
    assert len(problems) == 3
    for part in ("train.steps is -1", "hidden_act", "logit_scale"):
        assert any(part in problem for problem in problems)


# ---- the folder is gone


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run `runs/model` that began with the folder `model`, which is gone."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(LLAMA, "model")
    config = load("model", {})
    kept = config.folder / "huggingface"
    kept.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path("model", name), kept)
    (config.folder / "config.toml").write_text(to_toml(config))
    shutil.rmtree("model")
    return config


@pytest.mark.parametrize("options", [{}, {"run_dir": "runs/model"}])
def test_a_run_goes_on_without_the_folder(begun, options):
    config = load(None, {"init_from": "model", **options})
    assert config.model == begun.model
    assert config.data.tokenizer == Path("runs/model/huggingface")
    assert as_asked(config) == begun


def test_the_config_of_a_run_is_enough_to_go_on(begun):
    config = load("runs/model/config.toml", {})
    assert as_asked(config) == begun


def test_a_run_that_was_moved_is_evaluated_without_the_folder(begun, tmp_path):
    shutil.move("runs/model", "moved")
    config = arguments(["moved"], "evaluate", "", positional="RUN").config
    assert config.model == begun.model
    assert config.data.tokenizer == Path("moved/huggingface")


def test_a_run_that_began_otherwise_gives_nothing(begun):
    config = load(None, {"init_from": "other", "run_dir": "runs/model"})
    assert config.model.family == "gpt"


def test_the_folder_itself_is_read_while_it_is_there(begun):
    shutil.copytree(GOLDEN / "llama1", "model")
    assert load(None, {"init_from": "model", "data.tokenizer": str(LLAMA)}).model.norm_eps == 1e-6


# ---- commands


@pytest.mark.parametrize("command", [plan, explain])
def test_the_weights_of_a_run_have_no_effect_on_predictions(begun, command):
    with pytest.raises(RequestError, match="only the model of such a folder has an effect"):
        command.main(["--init-from=runs/model"])


def test_a_folder_takes_the_place_of_a_run():
    argv = [str(LLAMA), "--model.sequence=16", "--mesh=1x2x1"]
    config = arguments(argv, "evaluate", "", positional="RUN", pretrained=True).config
    assert config.folder == config.init_from == LLAMA
    assert config.data.tokenizer == LLAMA
    assert (config.model.sequence, config.model.rope_theta, config.mesh) == (16, 5e5, "1x2x1")


def test_a_run_keeps_its_own_sequence(begun):
    with pytest.raises(RequestError, match=r"--model\.sequence has no effect"):
        arguments(["runs/model", "--model.sequence=16"], "evaluate", "", positional="RUN", pretrained=True)


def test_only_commands_that_compute_with_weights_take_a_folder_for_a_run():
    with pytest.raises(RequestError, match=r"it has no config\.toml"):
        arguments([str(LLAMA)], "checkpoints", "", positional="RUN")


@pytest.mark.parametrize("command", [evaluate, generate])
def test_another_model_than_the_folders_is_refused(command):
    with pytest.raises(RequestError, match=r"--model.layers has no effect"):
        command.main([str(LLAMA), "--model.layers=2"])


NO_WEIGHTS = "is neither the folder of a run nor a checkpoint in one"
ADAPTER = "holds adapters of PEFT (adapter_config.json), which are no weights by themselves; begin a run with them by"


@pytest.fixture
def wrong_folders(tmp_path, monkeypatch):
    """Folders with which no run begins, as they are named from here, each with what is said of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    return {"missing": NO_WEIGHTS, "empty": NO_WEIGHTS, "adapter": ADAPTER}


@pytest.mark.parametrize("command", [train, plan, explain])
def test_a_description_refuses_what_no_run_begins_with(wrong_folders, command):
    """In the words of `train` itself."""
    for folder, said in wrong_folders.items():
        argv = [f"--init-from={folder}"]
        with pytest.raises(RequestError) as of_train:
            train.main(argv)
        with pytest.raises(RequestError) as refused:
            command.main([*argv, "--dry-run"] if command is train else argv)
        assert refused.value.problems == of_train.value.problems
        assert said in str(refused.value)


@pytest.mark.parametrize("command", [evaluate, generate, checkpoints, doctor, train])
def test_an_adapter_in_the_place_of_a_run_is_called_one(wrong_folders, command):
    with pytest.raises(RequestError) as refused:
        command.main(["adapter"])
    (problem,) = refused.value.problems
    assert ADAPTER in problem


def test_a_run_that_has_begun_is_described_without_its_folder(begun, capsys):
    assert train.main(["runs/model/config.toml", "--run-dir=runs/model", "--dry-run"]) == 0
    assert "layers" in capsys.readouterr().out
