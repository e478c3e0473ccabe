"""Promise 1 for combinations that nobody thought of: requests are drawn, and compared with one device.

A request is what a user writes: options of the command line. Most that are drawn are legal, and the others have to be
refused as requests, in sentences. Twelve are in every run of the suite, 200 are for `--exhaustive`:

    python -m pytest --exhaustive tests/parity/test_drawn.py
"""

from __future__ import annotations

import itertools
import random
import re
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from jaxdist.config import Config, ModelConfig, RequestError
from jaxdist.mesh import AXES, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.parallel.crossing.codes import compression
from jaxdist.request import load
from tests.parity import cases, test_experts
from tests.tiers import exhaustive

EVERY_RUN = 6
BY_HAND = 206

Options = dict[str, object]


class Drawn(NamedTuple):
    options: Options
    config: Config
    refused: list[list[str]]
    """The sentences about each request that was drawn before it and is not legal."""


def chance(rng: random.Random, likely: float) -> bool:
    return rng.random() < likely


def mesh(rng: random.Random, family: str) -> dict[str, int]:
    """The sizes of the axes, of 2, 4 or 8 devices together; `expert` is for mixtures alone."""
    axes = [axis for axis in AXES if axis != "expert" or family == "moe"]
    sizes = dict.fromkeys(axes, 1)
    for _ in range(rng.choice((1, 2, 2, 3, 3, 3))):
        sizes[rng.choice(axes)] *= 2
    return sizes


def model(rng: random.Random, family: str, sizes: dict[str, int]) -> Options:
    heads = rng.choice((4, 8))
    drawn: Options = dict(
        family=family,
        layers=rng.choice((2, 3, 5)) if sizes["pipeline"] == 1 else rng.choice((4, 5, 6)),
        embed=32,
        heads=heads,
        vocab=rng.choice((257, 264)),
        sequence=rng.choice((16, 32)),
        window=rng.choice((0, 0, 1, 5)),
        documents=rng.choice(("joined", "apart")),
        tied=rng.choice((True, False)),
        remat=rng.choice(("none", "dots", "block", "stage" if sizes["pipeline"] > 1 else "offload")),
        norm_eps=rng.choice((1e-5, 1e-3)),
    )
    if family == "gpt":
        drawn |= dict(dropout=rng.choice((0.0, 0.2)), positions=rng.choice((0, 0, 39)))
    else:
        drawn |= dict(
            mlp=rng.choice((64, 96)),
            kv_heads=rng.choice((0, heads // 2, heads // 4)),
            head_dim=rng.choice((0, 0, 6)),
            rope_theta=100.0,
            rope_scaling=rng.choice(("none", "linear,factor=4", "llama3,factor=8,original=8")),
            qkv_bias=rng.choice((False, True)),
            qk_norm=rng.choice(("none", "head", "full")),
        )
    if family == "moe":
        drawn |= experts(rng)
    if chance(rng, 0.2):
        drawn |= dict(
            lora_rank=rng.choice((1, 3)),
            lora_dropout=rng.choice((0.0, 0.2)),
            lora_targets=rng.choice(("", "q_proj,v_proj", "k_proj,o_proj")),
        )
        if drawn["window"] == 1:
            # Of one score the exact gradient is zero: that of an adapter of queries or keys alone would be rounding.
            drawn["window"] = 5
    return drawn


def experts(rng: random.Random) -> Options:
    return dict(
        mlp=0,
        expert_mlp=32,
        experts=rng.choice((4, 8)),
        experts_per_token=rng.choice((1, 2, 3)),
        shared_experts=rng.choice((0, 1)),
        router=rng.choice(("softmax", "sigmoid")),
        router_renormalize=rng.choice((True, False)),
        router_scale=rng.choice((1.0, 2.5)),
        balance_rate=rng.choice((0.0, 1e-2)),
        balance_loss=rng.choice((0.0, 1e-2)),
        z_loss=rng.choice((0.0, 1e-3)),
        capacity_factor=rng.choice((0.5, 1.25)),
    )


def parallel(rng: random.Random, sizes: dict[str, int]) -> Options:
    zero = rng.choice((0, 1, 2, 3))
    drawn: Options = dict(zero=zero)
    if sizes["model"] > 1:
        drawn["sequence"] = rng.choice((False, True, True))
        for rule in ("heads", "mlp", "vocab"):
            if chance(rng, 0.15):
                drawn[f"rules.{rule}"] = ""
    if sizes["context"] > 1:
        drawn["context"] = rng.choice(("auto", "ring", "ulysses"))
    if zero >= 2 and sizes["pipeline"] == 1:
        drawn["micro_batches"] = rng.choice(("inside", "inside", "outside"))
    if sizes["replica"] > 1:
        drawn["replica_zero"] = zero == 0 or chance(rng, 0.7)
        drawn["gradient_compression"] = rng.choice(("exact",) * 6 + ("bfloat16", "int8"))
    return drawn


def pipeline(rng: random.Random) -> Options:
    schedule = rng.choice(("gpipe", "1f1b", "interleaved", "zb-h1", "zb-u"))
    several = schedule in ("interleaved", "zb-h1", "zb-u") and chance(rng, 0.4)
    return dict(schedule=schedule, microbatches=rng.choice((2, 4)), virtual_stages=2 if several else 0)


def request(rng: random.Random) -> Options:
    """Options of the command line, by their names."""
    family = rng.choice(("gpt", "llama", "llama", "moe"))
    sizes = dict.fromkeys(AXES, 1) | mesh(rng, family)
    sections = dict(
        model=model(rng, family, sizes),
        parallel=parallel(rng, sizes),
        optimizer=dict(name="sgd", clip=rng.choice((0.0, 0.0, 0.5))),
        train=dict(global_batch_size=cases.ROWS),
    )
    if sizes["pipeline"] > 1:
        sections["pipeline"] = pipeline(rng)
    else:
        sections["train"]["accumulation"] = rng.choice((1, 1, 2, 4))
    options = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    return options | dict(mesh=",".join(f"{axis}={size}" for axis, size in sizes.items()), precision="float32")


def written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def drawn(seed: int) -> Drawn:
    """The first legal request that a seed gives, of at most 50."""
    rng = random.Random(seed)
    refused = []
    for _ in range(50):
        options = {name: written(value) for name, value in request(rng).items()}
        try:
            return Drawn(options, load("gpt_tiny", options), refused)
        except RequestError as error:
            refused.append(error.problems)
    raise AssertionError(f"of seed {seed} no request is legal: {refused[-1]}")


@cache
def one_device(model: ModelConfig, clip: float) -> cases.Outcome:
    outcome = cases.train(model=model, max_norm=clip, apart=model.documents == "apart")
    assert cases.moved(outcome) > 1e-3
    return outcome


def trained(config: Config) -> cases.Outcome:
    shape = parse_mesh(config.mesh)
    return cases.train(
        config.mesh,
        Split(config, shape).micro_batches,
        config.model,
        max_norm=config.optimizer.clip,
        stage=config.parallel.zero,
        inside=config.parallel.micro_batches == "inside",
        sequence=config.parallel.sequence,
        pipeline=config.pipeline,
        apart=config.model.documents == "apart",
        replica_zero=config.parallel.replica_zero,
        compression=compression(config.parallel),
        context=config.parallel.context,
        rules=config.parallel.rules,
    )


def check(seed: int) -> None:
    one = drawn(seed)
    config = one.config
    print(" ".join(f"--{name} {value or repr(value)}" for name, value in one.options.items()))  # for a failure
    got = trained(config)
    wanted = one_device(config.model.model_copy(update={"remat": "none"}), config.optimizer.clip)
    if config.parallel.gradient_compression != "exact":
        np.testing.assert_allclose(got.losses, wanted.losses, rtol=5e-3)
        np.testing.assert_allclose(got.losses[0], wanted.losses[0], rtol=1e-5)
    elif wanted.counts:
        test_experts.assert_equal(got, wanted)
    else:
        cases.assert_equal(got, wanted)


def test_what_is_not_legal_is_refused_in_sentences():
    """And most is legal, or hardly anything would be compared."""
    refused = [problems for seed in range(EVERY_RUN + BY_HAND) for problems in drawn(seed).refused]
    assert 10 < len(refused) < BY_HAND
    for problem in itertools.chain(*refused):
        assert "\n" not in problem
        assert re.search(r"; .*\b(set|use|give|leave|lower)\b", problem), problem


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(EVERY_RUN))
def test_a_drawn_request_equals_one_device(seed):
    check(seed)


@pytest.mark.parametrize("seed", exhaustive(zip(range(EVERY_RUN, EVERY_RUN + BY_HAND))))
def test_many_drawn_requests_equal_one_device(seed):
    check(seed)
