"""Every knob has a row that says when it has an effect; where it has none, a request or a run says so."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

import pytest

from jaxdist import checkpoints, train
from jaxdist.config import Config, RequestError
from jaxdist.mesh import AXES
from jaxdist.request import load
from jaxdist.request.conditions import Condition, Known
from jaxdist.request.knobs import KNOBS, kind, value_of
from jaxdist.request.unused import EFFECTS, notes
from tests import recipes

BY_REQUEST = {
    "text": ({}, {"model.family": "cnn"}),
    "images": ({"model.family": "cnn"}, {}),
    "rotary": ({"model.family": "llama"}, {}),
    "learned_positions": ({}, {"model.family": "llama"}),
    "dropout": ({}, {"model.family": "llama"}),
    "experts": ({"model.family": "moe"}, {"model.family": "llama"}),
    "width_of_mlp": ({"model.family": "moe"}, {"model.family": "moe", "model.expert_mlp": "32"}),
    "longer_rows": ({}, {"model.sequence": "16"}),
    "sliding_layers": ({"model.period": "sliding,full"}, {}),
    "latent_attention": ({"model.kv_latent": "16"}, {}),
    "groups_of_experts": ({"model.router_group_score": "best"}, {}),
    "shared": ({"model.shared_experts": "1"}, {}),
    "frozen": ({"model.lora_rank": "4"}, {}),
    "model_axis": ({"mesh": "1x2x1"}, {"mesh": "2x1x1"}),
    "splits_heads": ({"mesh": "1x2x1"}, {"mesh": "2x1x1"}),
    "splits_mlp": ({"mesh": "1x2x1"}, {"mesh": "2x1x1"}),
    "splits_vocab": ({"mesh": "1x2x1"}, {"mesh": "2x1x1"}),
    "context_axis": ({"mesh": "context=2"}, {"mesh": "2x1x1"}),
    "pipeline_axis": ({"mesh": "1x1x2"}, {"mesh": "2x1x1"}),
    "replicas": ({"mesh": "replica=2"}, {"mesh": "2x1x1"}),
    "whole_gradient": ({}, {"mesh": "1x1x2", "pipeline.schedule": "pipedream", "optimizer.clip": "0"}),
    "several_devices": ({"mesh": "2x1x1"}, {"mesh": "1x1x1"}),
    "sharded": ({"parallel.zero": "1"}, {"parallel.zero": "0"}),
    "sharded_gradients": ({"parallel.zero": "2"}, {"parallel.zero": "1"}),
    "accumulation": ({"mesh": "1x1x1", "train.accumulation": "2"}, {"mesh": "1x1x1", "train.accumulation": "1"}),
    "no_stages": ({"mesh": "2x1x1"}, {"mesh": "1x1x2"}),
    "moments": ({}, {"optimizer.name": "sgd", "optimizer.beta1": "0"}),
    "has_parallel_gradient_compression_topk_int8": (
        {"parallel.gradient_compression": "topk-int8"},
        {"parallel.gradient_compression": "powersgd"},
    ),
    "has_parallel_gradient_compression_powersgd": (
        {"parallel.gradient_compression": "powersgd"},
        {"parallel.gradient_compression": "int8"},
    ),
    "mixture": ({"data.mixture": "a*0.7,b*0.3"}, {}),
    "fraction_held_out": ({}, {"data.path": __file__, "data.validation_path": recipes.__file__}),
    "first_moment": ({"optimizer.name": "lion"}, {"optimizer.name": "adafactor"}),
    "has_moments": ({"optimizer.name": "sgd"}, {"optimizer.name": "adafactor"}),
    "second_moment": ({"optimizer.name": "lion"}, {"optimizer.name": "sgd"}),
    "ends_by_decay": ({"optimizer.schedule": "inverse-sqrt"}, {"optimizer.schedule": "linear"}),
    "decay": ({"optimizer.schedule": "constant"}, {"optimizer.schedule": "constant", "optimizer.decay_fraction": "0"}),
    "outer_steps": ({"mesh": "replica=2", "train.local_steps": "2"}, {}),
    "has_train_objective_dpo": ({"train.objective": "dpo"}, {"train.objective": "orpo"}),
    "has_train_objective_orpo": ({"train.objective": "orpo"}, {"train.objective": "dpo"}),
    "samples": ({"sample.every": "2"}, {}),
}
"""Condition -> (what a request has beside the knob where the condition holds, and where it does not)."""

BY_RUN = {
    "within_validation_every": ({}, Known(steps=7), Known(steps=6)),
    "within_checkpoint_every": ({}, Known(steps=7), Known(steps=6)),
    "within_log_every": ({}, Known(steps=7), Known(steps=6)),
    "within_sample_every": ({}, Known(steps=7), Known(steps=6)),
    "an_epoch": ({}, Known(steps=7, steps_of_epoch=7), Known(steps=7, steps_of_epoch=7.5)),
    "saves_more": ({"checkpoint.every": "10"}, Known(steps=71), Known(steps=70)),
    "removes_one": ({"checkpoint.every": "2"}, Known(steps=19), Known(steps=18)),
    "more_held_out": ({}, Known(validation_batches=7), Known(validation_batches=6)),
    "several_processes": ({}, Known(processes=2), Known(processes=1)),
}
"""Condition -> (what a request has beside the knob, what a run knows where the condition holds, and where not)."""

VALUES = {
    "model.head_dim": "32",
    "model.heads": "2",
    "model.rope_theta": "10000",
    "model.rope_scaling": "linear,factor=2",
    "model.period": "sliding,full",
    "model.mlp": "256",
    "model.experts": "4",
    "model.positions": "256",
    "model.window": "16",
    "model.lora_targets": "q_proj",
    "model.remat": "dots",
    "model.kv_heads": "2",
    "parallel.rules.heads": "",
    "parallel.rules.mlp": "",
    "parallel.rules.vocab": "",
    "pipeline.schedule": "gpipe",
    "pipeline.virtual_stages": "1",
    "data.tokenizer": __file__,
    "data.mixture": "a*0.7,b*0.3",
    "sample.prompts": "def",
    "cluster.site": "zurich",
    "checkpoint.keep_every": "14",
    "optimizer.decay_fraction": "0.3",
}
"""A value that differs from the default, where the one of `other` would be refused for another reason."""


def other(name: str) -> str:
    """A value that is not the default of the knob."""
    if name in VALUES:
        return VALUES[name]
    field = KNOBS[name]
    if get_origin(field.annotation) is Literal:
        return next(str(choice) for choice in get_args(field.annotation) if choice != field.default)
    if kind(field.annotation) == "true|false":
        return str(not field.default).lower()
    if kind(field.annotation) == "float":
        return "0.5"
    return "7"


ROWS = [(name, one) for name, conditions in EFFECTS.items() for one in conditions]


def beside(name: str, one: Condition) -> dict[str, str]:
    """The knob, and what lets the other conditions of its row hold."""
    request: dict[str, str] = {}
    for condition in EFFECTS[name]:
        if condition.name != one.name:
            request |= BY_REQUEST[condition.name][0]
    return {**request, name: other(name)}


def told(name: str, request: dict[str, str]) -> list[str]:
    """The sentences of a refusal that say that the knob has no effect; other problems are not looked at."""
    try:
        load(None, request)
    except RequestError as error:
        return [problem for problem in error.problems if problem.startswith(f"{name} is ") and "not use it" in problem]
    return []


def test_every_knob_has_a_row_and_every_condition_a_case():
    assert sorted(EFFECTS) == sorted(KNOBS)
    names = {one.name for _, one in ROWS}
    assert names == {*BY_REQUEST, *BY_RUN}
    assert not set(BY_REQUEST) & set(BY_RUN)


@pytest.mark.parametrize("condition", BY_REQUEST)
def test_a_request_is_refused_where_a_knob_has_no_effect(condition):
    holds, fails = BY_REQUEST[condition]
    for name, one in ROWS:
        if one.name != condition:
            continue
        request = {**beside(name, one), **fails, name: other(name)}
        (sentence,) = told(name, request)
        assert "; leave it out (its default is " in sentence
        assert not told(name, {**beside(name, one), **holds, name: other(name)}), name


ONES = dict.fromkeys(AXES, 1)


@pytest.mark.parametrize("condition", BY_RUN)
def test_a_run_has_a_line_where_a_knob_has_no_effect(condition):
    more, holds, fails = BY_RUN[condition]
    for name, one in ROWS:
        if one.name == condition:
            config = load(None, {**more, name: other(name)} | ({"sample.prompts": "a"} if "sample" in name else {}))
            assert value_of(config, name) != KNOBS[name].default
            (note,) = notes(config, fails, [name])
            assert note.startswith(f"{name} is ")
            assert notes(config, holds, [name]) == []
            assert notes(config, Known(), [name]) == []


@pytest.mark.parametrize(
    ("request_", "axis"),
    [
        ({"mesh": "1x-1x1", "parallel.sequence": "true"}, "model"),
        ({"mesh": "1x1x-1", "pipeline.schedule": "gpipe"}, "pipeline"),
        ({"mesh": "context=-1", "parallel.context": "ring"}, "context"),
        ({"mesh": "replica=-1", "parallel.zero": "1", "parallel.replica_zero": "false"}, "replica"),
        ({"mesh": "1x-1x1", "parallel.rules.heads": ""}, "model"),
    ],
)
def test_an_axis_that_is_filled_decides_in_the_run(request_, axis):
    config = load(None, request_)
    assert len(notes(config, Known({**ONES, axis: 1}))) == 1
    assert notes(config, Known({**ONES, axis: 2})) == []


def test_only_what_the_command_line_says_and_what_differs_from_the_default(tmp_path):
    assert not told("model.window", {"model.window": "0", "model.sequence": "16"})
    # The window is that of the shipped configuration, the length of rows the user's.
    assert load("mistral_7b", {"model.sequence": "1024"}).model.window == 4096
    with pytest.raises(RequestError, match=r"model.window is 4096, but model.sequence 1024"):
        load("mistral_7b", {"model.sequence": "1024", "model.window": "4096"})
    file = tmp_path / "my.toml"
    file.write_text("model.window = 4096\nmodel.sequence = 1024\nmodel.unroll_layers = true\n")
    known = Known(ONES | {"pipeline": 2})
    window, layers = notes(load(str(file), {"mesh": "1x1x2"}), known)
    assert "model.window is 4096, but model.sequence 1024" in window
    assert "model.unroll_layers is true, but mesh 1x1x2, whose stages loop" in layers
    # A shipped configuration may be for another mesh too.
    assert len(notes(load("llama_8b", {"mesh": "1x1x2"}), known)) == 2


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        ("--mesh 2x1x1 --pipeline.virtual-stages 5", "pipeline.virtual_stages is 5, but mesh 2x1x1"),
        ("--model.family cnn --model.remat stage", "model.remat is stage, but model.family cnn"),
        ("--mesh 2x1x1 --parallel.sequence true --model.sequence 127", "parallel.sequence is true, but mesh 2x1x1"),
        ("--mesh 1x1x1 --parallel.rules.heads= --parallel.sequence false", "parallel.rules.heads is empty"),
    ],
)
def test_one_cause_has_one_sentence(argv, sentence):
    with pytest.raises(RequestError) as caught:
        train.main([*argv.split(), "--dry-run"])
    (problem,) = caught.value.problems
    assert sentence in problem
    assert "does not use it; leave it out" in problem


def test_a_dry_run_says_what_a_run_of_its_length_does_not_use(capsys):
    argv = "--dry-run --train.steps 20 --validation.every 21 --checkpoint.keep 9 --sample.every 30 --sample.prompts a"
    assert train.main(argv.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "does not use it" in line] == [
        "note        validation.every is 21, but a run of 20 steps does not use it",
        "note        checkpoint.keep is 9, but a run of 20 steps, which saves 1 checkpoint, does not use it",
        "note        sample.every is 30, but a run of 20 steps does not use it",
    ]


@pytest.mark.parametrize(
    ("argv", "needs"),
    [
        ("--force", "--export"),
        ("--checkpoint 3", "--export"),
        ("--checkpoint.keep 2", "--prune"),
        ("--checkpoint.keep-every 2", "--prune"),
        ("--export weights.safetensors --checkpoint.keep 2", "--prune"),
        ("--prune --force", "--export"),
    ],
)
def test_options_of_checkpoints_that_have_no_effect(argv, needs, tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RequestError) as caught:
        checkpoints.main([str(tmp_path), *argv.split()])
    (problem,) = caught.value.problems
    option = argv.split()[-1] if argv.endswith("--force") else argv.split()[-2]
    assert problem.startswith(option)
    assert f"without {needs}" in problem


def test_epochs_that_do_not_end_save_nothing():
    config = load(None, {"checkpoint.epochs": "true", "checkpoint.keep": "9"})
    (ends_before, keeps_all) = notes(config, Known(steps=150, steps_of_epoch=151))
    assert "ends before its first epoch" in ends_before
    assert "which saves 2 checkpoints" in keeps_all
    assert notes(config, Known(steps=150, steps_of_epoch=75)) == []


def test_all_defaults_are_used():
    assert notes(Config(), Known(ONES, 1, 1, 100.0, 1)) == []
