"""Numbers that float32 turns into others are refused where they reach the devices: a row for each knob of a float."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.generate import main as generate
from jaxdist.request import load
from jaxdist.request.knobs import KNOBS

ZERO = ["1e-50", "1e-39", "1.1754942e-38"]
INFINITE = ["1e308", "1e39", "3.4028236e38"]
ONE = ["0.9999999999", "0.99999998"]
KEPT = ["1.1754945e-38", "0.5", "3.4028234e38"]

NUMBER = (ZERO, INFINITE, KEPT)
NUMBER_OR_ZERO = (ZERO, INFINITE, ["0", "0.9999999999", *KEPT])
FRACTION = (ZERO, ONE, ["0", "1.1754945e-38", "0.5", "0.9999999", "0.99999997"])

OF_DEVICES = {
    "model.rope_theta": ([], INFINITE, ["1", "1e4", "3.4028234e38"]),  # at least 1: the angles are powers of 1 / theta
    "model.norm_eps": NUMBER,
    "model.router_scale": NUMBER,
    "model.balance_rate": NUMBER_OR_ZERO,
    "model.balance_loss": NUMBER_OR_ZERO,
    "model.z_loss": NUMBER_OR_ZERO,
    **dict.fromkeys(("model.embedding_multiplier", "model.residual_multiplier", "model.logits_divisor"), NUMBER),
    **dict.fromkeys(("model.sliding_theta", "model.attention_multiplier"), NUMBER_OR_ZERO),
    "model.rotary_fraction": (ZERO, [], ["0.5", "1"]),
    "model.attention_cap": NUMBER_OR_ZERO,
    "model.logit_cap": NUMBER_OR_ZERO,
    "model.dropout": FRACTION,
    "model.lora_alpha": NUMBER_OR_ZERO,
    "model.lora_dropout": FRACTION,
    "optimizer.learning_rate": NUMBER,
    "optimizer.final": NUMBER_OR_ZERO,
    "optimizer.beta1": FRACTION,
    "optimizer.beta2": FRACTION,
    "optimizer.weight_decay": NUMBER_OR_ZERO,
    "optimizer.clip": NUMBER_OR_ZERO,
    "optimizer.outer_rate": NUMBER,
    "train.dpo_beta": NUMBER,
    "train.orpo_lambda": NUMBER,
    "train.spike": (ZERO, INFINITE, ["0", "3", "3.4028234e38"]),
    "optimizer.outer_momentum": FRACTION,
}
"""Knob -> (what float32 turns into 0, what into infinity or, of a fraction, 1, what it keeps)."""

OF_HOSTS = {
    "parallel.compression_density": "counts the numbers of a block",
    "model.capacity_factor": "counts rows of a round",
    "data.validation_fraction": "counts documents or tokens",
    "optimizer.decay_fraction": "counts steps",
    "train.epochs": "counts steps",
    "checkpoint.minutes": "is compared with a clock",
    "checkpoint.grace_seconds": "is compared with a clock",
    "fault.hang_seconds": "is compared with a clock",
}
"""Knob -> what Python does with it, in float64."""

USED = {
    "model.rope_theta": {"model.family": "llama"},
    "model.router_scale": {"model.family": "moe"},
    "model.balance_rate": {"model.family": "moe"},
    "model.balance_loss": {"model.family": "moe"},
    "model.z_loss": {"model.family": "moe"},
    "model.embedding_multiplier": {"model.family": "llama"},
    "model.residual_multiplier": {"model.family": "llama"},
    "model.attention_multiplier": {"model.family": "llama"},
    "model.logits_divisor": {"model.family": "llama"},
    "model.rotary_fraction": {"model.family": "llama"},
    "model.sliding_theta": {"model.family": "llama", "model.period": "sliding,full"},
    "model.attention_cap": {"model.family": "llama"},
    "model.logit_cap": {"model.family": "llama"},
    "model.lora_alpha": {"model.lora_rank": "4"},
    "model.lora_dropout": {"model.lora_rank": "4"},
    "model.capacity_factor": {"model.family": "moe"},
    "optimizer.decay_fraction": {"optimizer.schedule": "constant"},
    "parallel.compression_density": {"parallel.gradient_compression": "topk-int8", "mesh": "replica=2"},
    "train.dpo_beta": {"train.objective": "dpo"},
    "train.orpo_lambda": {"train.objective": "orpo"},
    "optimizer.outer_rate": {"train.local_steps": "10", "mesh": "replica=2"},
    "optimizer.outer_momentum": {"train.local_steps": "10", "mesh": "replica=2"},
}
"""Knob -> others without which it has no effect."""


def test_every_knob_that_is_a_float_has_a_row():
    floats = {name for name, field in KNOBS.items() if float in (field.annotation, *get_args(field.annotation))}
    assert floats == {*OF_DEVICES, *OF_HOSTS}
    assert not OF_DEVICES.keys() & OF_HOSTS.keys()


def refusal(name: str, text: str, **more: str) -> str:
    with pytest.raises(RequestError) as error:
        load(None, USED.get(name, {}) | {name: text} | more)
    (problem,) = error.value.problems
    return problem


@pytest.mark.parametrize("name", OF_DEVICES)
def test_what_float32_turns_into_another_number_is_refused(name, tmp_path):
    zero, end, kept = OF_DEVICES[name]
    for text in zero:
        assert refusal(name, text) == f"{name} is {text}: in float32 it becomes 0; choose at least 1.2e-38"
    becomes, most = ("1", "0.9999999") if end is ONE else ("infinity", "3.4e38")
    for text in end:
        assert refusal(name, text) == f"{name} is {text}: in float32 it becomes {becomes}; choose at most {most}"
        file = tmp_path / "my.toml"
        section, knob = name.split(".")
        file.write_text(f"[{section}]\n{knob} = {text}")
        with pytest.raises(RequestError, match=f"in float32 it becomes {becomes}"):
            load(str(file), {})
    for text in kept:
        final = {"optimizer.final": "0"} if name == "optimizer.learning_rate" else {}
        rate = {"optimizer.learning_rate": "1e-3"} if name == "optimizer.final" else {}
        section, knob = name.split(".")
        found = getattr(getattr(load(None, USED.get(name, {}) | final | rate | {name: text}), section), knob)
        assert found == float(text)


def test_the_rows_are_right_about_float32():
    with np.errstate(over="ignore"):
        assert np.isinf(np.array(INFINITE, np.float64).astype(np.float32)).all()
        smallest = np.finfo(np.float32).smallest_normal
        assert (np.array(ZERO, np.float64).astype(np.float32) < smallest).all()
        assert (np.array(ONE, np.float64).astype(np.float32) == 1).all()
        assert np.isfinite(np.array(KEPT, np.float64).astype(np.float32)).all()
        assert (np.array(KEPT, np.float64).astype(np.float32) >= smallest).all()
        assert np.float32(0.99999997) < 1


@pytest.mark.parametrize("name", OF_HOSTS)
def test_what_python_computes_with_may_be_as_small_as_it_likes(name):
    section, knob = name.split(".")
    assert getattr(getattr(load(None, USED.get(name, {}) | {name: "1e-50"}), section), knob) == 1e-50


def test_the_learning_rate_at_the_end_has_to_be_a_number_too():
    problem = refusal("optimizer.learning_rate", "1e30", **{"optimizer.final": "1e20"})
    assert problem == (
        "optimizer.learning_rate 1e+30 x optimizer.final 1e+20, the learning rate at the end, becomes infinity in "
        "float32; lower optimizer.final"
    )


@pytest.mark.parametrize("text", [ZERO[0], INFINITE[1]])
def test_a_temperature_divides_logits_on_the_devices(text, tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RequestError, match=rf"^--temperature is {text}: in float32 it becomes \w+; choose"):
        generate([str(tmp_path), f"--temperature={text}"])


def test_a_share_of_the_probability_is_compared_on_the_devices(tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RequestError, match=rf"^--top-p is {ZERO[0]}: in float32 it becomes 0; choose"):
        generate([str(tmp_path), f"--top-p={ZERO[0]}"])
