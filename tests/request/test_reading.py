"""Right requests: what wins over what, how names are spelt, and that a resolved config reads back the same."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import pytest
from pydantic import ValidationError

from jaxdist.config import Config, DataConfig, ModelConfig, RequestError, RulesConfig, TrainConfig, leaves
from jaxdist.mesh import parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.request import SHIPPED, check_mesh_fits, fitting, load, to_toml
from jaxdist.request.checks import CHECKS
from jaxdist.request.knobs import KNOBS, nest
from jaxdist.training.resume_check import differing


@pytest.fixture
def write(tmp_path):
    def write(text: str, name: str = "my.toml") -> str:
        (tmp_path / name).write_text(text, "utf-8")
        return str(tmp_path / name)

    return write


def test_knobs_are_all_and_described():
    assert list(KNOBS) == list(leaves(Config()))
    assert all(field.description for field in KNOBS.values())
    assert {name for check in CHECKS for name in check.reads} <= set(KNOBS)


def test_no_config_is_the_defaults():
    assert load(None, {}) == load("gpt_tiny", {}) == Config(run_dir=Path("runs/gpt_tiny"))


def test_shipped_configs():
    assert list(SHIPPED) == sorted(SHIPPED)
    assert {"cnn_digits", "gpt2_124m", "gpt_tiny", "llama_1b", "llama_3b", "llama_70b", "llama_8b"} <= set(SHIPPED)
    config = load("gpt2-124m", {})
    model = config.model
    assert (model.layers, model.embed, model.heads, model.vocab, model.sequence) == (12, 768, 12, 50304, 1024)
    assert model.tied
    assert config.run_dir == Path("runs/gpt2_124m")


@pytest.mark.parametrize(
    ("name", "billions"), [("llama_1b", 1.24), ("llama_3b", 3.21), ("llama_8b", 8.03), ("llama_70b", 70.6)]
)
def test_shipped_llamas_have_the_published_number_of_parameters(name, billions):
    model = load(name, {"mesh": "1x8x1"}).model
    attention = 2 * model.embed**2 * (1 + model.key_value_heads / model.heads)
    block = attention + 3 * model.embed * model.mlp_size + 2 * model.embed
    tables = (1 if model.tied else 2) * model.vocab * model.embed
    assert model.family == "llama"
    assert (model.layers * block + tables + model.embed) / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("embed", "size"), [(4096, 11008), (5120, 13824), (96, 256)])  # LLaMA's 7B and 13B
def test_mlp_of_llama(embed, size):
    assert ModelConfig(family="llama", embed=embed).mlp_size == size
    assert ModelConfig(family="llama", embed=embed, mlp=7).mlp_size == 7
    assert ModelConfig(embed=embed).mlp_size == 4 * embed


def test_sections_in_sections(write):
    text = "mesh = '1x2x1'\n[parallel]\nzero = 2\nsequence = true\n[parallel.rules]\nheads = ''\nvocab = 'model'"
    config = load(write(text), {"parallel.zero": "3", "parallel.sequence": "false", "parallel.rules.vocab": ""})
    assert (config.parallel.zero, config.parallel.sequence) == (3, False)
    assert config.parallel.rules == RulesConfig(heads="", mlp="model", vocab="")
    assert '\n[parallel.rules]\nheads = ""\nmlp = "model"\n' in to_toml(config)


def test_a_run_may_go_on_with_another_split():
    other = {"mesh": "1x2x1", "parallel.zero": "3", "parallel.sequence": "true", "parallel.rules.vocab": ""}
    assert differing(load(None, {}), load(None, other)) == []
    stages = {"mesh": "1x1x2", "pipeline.microbatches": "4", "model.remat": "stage"}
    assert differing(load(None, {}), load(None, stages)) == []
    assert differing(load(None, {}), load(None, {"train.accumulation": "2"})) == []
    images = {"model.family": "cnn"}
    assert differing(load(None, images), load(None, images | {"train.accumulation": "2"})) == ["train.accumulation"]
    assert differing(load(None, {}), load(None, {"model.family": "llama", **other})) == ["model.family"]
    assert differing(load(None, {}), load(None, {"model.documents": "apart", **other})) == ["model.documents"]


FREE = """
mesh run_dir resume data.path data.validation_path data.changed data.on_error data.dtype data.prefetch data.skip
model.remat model.unroll_layers model.attention model.capacity_factor train.accumulation train.deterministic train.spike
train.max_raised
parallel.* pipeline.*
validation.* checkpoint.* log.* sample.* profile.* cluster.* fault.*
"""
"""Knobs that may differ when a run of text goes on, written out here so that none becomes free by mistake."""

NOT_FREE = """
parallel.gradient_compression parallel.compression_density parallel.compression_rank parallel.delayed_gradients
"""
"""Those of `FREE` that may not, because they change the loss."""


def another(name: str) -> object:
    """A legal value of a knob that is not its default."""
    default, kind = KNOBS[name].default, KNOBS[name].annotation
    given = {"resume": "7", "mesh": "2x1x1", "train.epochs": 1.5, "model.rope_theta": 1e4}
    given |= {"model.rope_scaling": "linear,factor=2", "model.lora_targets": "q_proj", "data.text": "content"}
    given |= {"data.mixture": "a*0.7,b*0.3", "model.period": "sliding,full", "optimizer.rates": "head=2"}
    given |= {"fault.notify": "http://h"}
    if name in given:
        return given[name]
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, str):
        return "" if default else "other"
    if isinstance(default, int):
        return default + 1
    return default / 2 + 0.25 if isinstance(default, float) else Path("other")


@pytest.mark.parametrize("name", KNOBS)
def test_every_knob_that_is_not_free_is_named_on_resume(name):
    changed = Config.model_validate(nest({name: another(name)}))
    assert [knob for knob, value in leaves(changed).items() if value != leaves(Config())[knob]] == [name]
    free = name in FREE.split() or f"{name.partition('.')[0]}.*" in FREE.split()
    free = free and name not in NOT_FREE.split()
    assert differing(Config(), changed) == ([] if free else [name])
    assert differing(changed, Config()) == ([] if free else [name])


def test_command_line_over_file_over_defaults(write):
    path = write("[model]\nlayers = 6\nheads = 2\n[optimizer]\nlearning-rate = 1\n[data]\nprefetch = 3")
    config = load(path, {"model.layers": "7", "train.global-batch-size": "8", "model.tied": "false"})
    assert (config.model.layers, config.model.heads, config.model.embed) == (7, 2, 128)
    assert (config.optimizer.learning_rate, config.train.global_batch_size, config.model.tied) == (1.0, 8, False)
    assert config.run_dir == Path("runs/my")


@pytest.mark.parametrize("key", ["train.global-batch-size", "train.global_batch_size", "'train.global-batch-size'"])
def test_hyphens_and_underscores_in_a_file(write, key):
    assert load(write(f"{key} = 24"), {}).train.global_batch_size == 24


@pytest.mark.parametrize("name", ["train.global-batch-size", "train.global_batch_size"])
def test_hyphens_and_underscores_in_overrides(name):
    assert load(None, {name: "24"}).train.global_batch_size == 24


def test_none_takes_a_path_back(write):
    path = write("run_dir = 'x'\n[data]\npath = 'gone.txt'")
    config = load(path, {"data.path": "none", "run_dir": "none"})
    assert config.data.path is None
    assert config.run_dir == Path("runs/my")


def test_length_on_the_command_line_wins(write):
    steps, epochs = write("train.steps = 50", "steps.toml"), write("train.epochs = 2", "epochs.toml")
    assert load(steps, {"train.epochs": "3"}).train == TrainConfig(epochs=3)
    assert load(steps, {"train.epochs": "0"}).train == TrainConfig(steps=50)
    assert load(epochs, {"train.steps": "30"}).train == TrainConfig(steps=30)


def test_default_warmup_fits_a_short_run():
    assert load(None, {"train.steps": "5"}).optimizer.warmup == 1
    assert load(None, {"train.epochs": "0.01"}).optimizer.warmup == 20


def test_every_device_count_is_checked_alike():
    config = load(None, {"train.global_batch_size": "10", "mesh": "-1x1x1"})
    check_mesh_fits(Split(config, parse_mesh("5x1x1")))
    with pytest.raises(
        RequestError, match=r"global_batch_size 10 does not divide by 4 replica x data ranks .*; set it to 8 or 12"
    ):
        check_mesh_fits(Split(config, parse_mesh("data=2,replica=2")))


@pytest.mark.parametrize(
    ("mesh", "devices", "most"),
    [
        ("-1x1x1", 7, 6),
        ("-1x2x1", 7, 6),
        ("2x-1x1", 1 << 20, 8),
        ("1x1x-1", 1 << 20, 5),
        ("-1x1x1", (1 << 20) - 1, 120),
        ("2x2x1", 9, 9),
        ("auto", 9, 9),
    ],
)
def test_the_most_devices_that_fit(mesh, devices, most):
    """Without a look at each number: of a million devices that would take minutes."""
    config = load(None, {"mesh": mesh, "train.global_batch_size": "120", "model.layers": "5", "model.heads": "4"})
    began = time.perf_counter()
    assert fitting(config, devices) == most
    assert time.perf_counter() - began < 1


def test_a_filled_axis_is_checked_when_it_is_known():
    config = load(None, {"mesh": "1x-1x1", "model.mlp": "510"})
    check_mesh_fits(Split(config, parse_mesh("1x2x1")))
    with pytest.raises(RequestError) as caught:
        check_mesh_fits(Split(config, parse_mesh("3x8x1")))
    batch, heads, mlp = caught.value.problems
    assert "does not divide by 3 data ranks" in batch
    assert heads.endswith("by model=8 (mesh 1x-1x1); set model.heads to 8, or the model axis to 2")
    assert "set model.mlp to 504 or 512, or the model axis to 2" in mlp


LLAMA = {"model.family": "llama", "model.embed": "96", "model.heads": "12"}


@pytest.mark.parametrize(
    "overrides",
    [
        {"mesh": "2x4x1", "parallel.zero": "3", "parallel.sequence": "true", "precision": "mixed"},
        {
            "mesh": "1x-1x1",
            "parallel.sequence": "true",
            "parallel.zero": "2",
            "parallel.micro_batches": "outside",
            "train.accumulation": "2",
        },
        {"mesh": "1x3x1", "parallel.rules.heads": "", "parallel.rules.mlp": "", "model.vocab": "2050"},
        {"mesh": "1x3x1", "parallel.rules.heads": "", "parallel.rules.vocab": "", "model.mlp": "300"},
        {"mesh": "1x16x1", "parallel.rules.heads": "", "model.heads": "4"},
        {"mesh": "1x2x1", "model.vocab": "50257"},
        {"mesh": "data=2,replica=2,model=2", "model.sequence": "127"},
        {**LLAMA, "model.kv_heads": "4", "mesh": "1x2x1"},
        {**LLAMA, "model.kv_heads": "2", "mesh": "1x4x1"},
        {**LLAMA, "model.kv_heads": "12", "model.rope_theta": "10000", "mesh": "1x4x1"},
        {**LLAMA, "model.kv_heads": "1", "mesh": "1x6x1", "model.mlp": "6"},
    ],
)
def test_requests_that_fit(write, overrides):
    config = load(None, overrides)
    check_mesh_fits(Split(config, parse_mesh(config.mesh.replace("-1", "1"))))
    assert load(write(to_toml(config)), {}) == config


def test_what_a_command_does_not_use_is_not_checked(write):
    path = write("run_dir = '/dev/null/run'\nmodel.vocab = 3\ndata.path = 'gone.txt'")
    assert load(path, {"mesh": "2x1x1"}, knobs=["mesh"]).mesh == "2x1x1"
    with pytest.raises(RequestError, match=r"^--train\.steps has no effect on this command"):
        load(path, {"train.steps": "3"}, knobs=["mesh", "model.layers"])


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"train.epochs": "1.5", "mesh": "data=2,replica=2"},
        {"train.steps": "3", "optimizer.learning_rate": "1e-05", "model.tied": "no", "data.prefetch": "7"},
        {"run_dir": 'we "said" so\t\x7f ü 𝄞', "resume": "never", "optimizer.clip": "1e22"},
    ],
)
@pytest.mark.parametrize("name", [None, "gpt2_124m", "llama_8b"])
def test_round_trip(write, name, overrides):
    if name and "train.steps" in overrides:
        overrides = {**overrides, "optimizer.warmup": "2"}
    config = load(name, overrides)
    text = to_toml(config)
    assert text.startswith("# The resolved configuration of a run, written by jaxdist ")
    assert load(write(text, "config.toml"), {}) == config


def test_round_trip_of_files(write, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write("text", "a.txt"), write("text", "b\\c.txt")
    config = load(None, {"data.path": "a.txt", "data.validation_path": "b\\c.txt"})
    assert config.data == DataConfig(path="a.txt", validation_path="b\\c.txt")
    assert load(write(to_toml(config)), {}) == config


@pytest.mark.parametrize(
    ("legal", "refused"),
    [
        ({"train.steps": "7", "optimizer.warmup": "7"}, {"optimizer.warmup": "8"}),
        (
            {"train.steps": "10", "optimizer.warmup": "8", "optimizer.schedule": "constant"},
            {"optimizer.warmup": "9"},  # the last fifth decays
        ),
        ({"train.steps": "12", "profile.steps": "12"}, {"profile.steps": "13"}),
        ({"train.steps": "12", "profile.steps": "12-12"}, {"profile.steps": "12-11"}),
        ({"model.embed": "128", "model.heads": "128"}, {"model.heads": "256"}),
        ({**LLAMA, "model.heads": "48", "model.kv_heads": "48"}, {"model.heads": "96", "model.kv_heads": "96"}),
        ({"optimizer.learning_rate": "1e38", "optimizer.final": "3.39"}, {"optimizer.final": "3.41"}),
        ({"train.steps": "1"}, {"train.steps": "0"}),
    ],
)
def test_what_is_just_legal_together(legal, refused):
    load(None, legal)
    with pytest.raises(RequestError):
        load(None, legal | refused)


COUNTS = """
model.embed model.heads model.experts model.experts_per_token model.vocab train.max_skipped checkpoint.keep log.every
model.router_groups model.router_groups_kept
"""
COUNTS_OR_0 = """
model.kv_heads model.head_dim model.mlp model.expert_mlp model.shared_experts model.positions model.window
model.dense_layers model.kv_latent model.q_latent model.rope_dim model.value_dim
model.lora_rank pipeline.virtual_stages optimizer.warmup train.steps validation.every sample.every
validation.batches checkpoint.every checkpoint.keep_every cluster.processes train.local_steps
fault.compare fault.rollbacks train.max_raised
"""
AT_LEAST_0 = """
model.lora_alpha model.balance_rate model.balance_loss model.z_loss model.attention_cap model.logit_cap
model.sliding_theta model.attention_multiplier
optimizer.final optimizer.weight_decay optimizer.clip train.spike
"""
BELOW_1 = "model.dropout model.lora_dropout optimizer.beta1 optimizer.beta2 optimizer.outer_momentum"
LARGEST = 2**31 - 1

EDGES = {
    **dict.fromkeys(COUNTS.split(), ([1, LARGEST], [0, LARGEST + 1])),
    **dict.fromkeys(COUNTS_OR_0.split(), ([0, LARGEST], [-1, LARGEST + 1])),
    **dict.fromkeys(AT_LEAST_0.split(), ([0.0, 3e38], [-1e-9, math.inf, math.nan])),
    **dict.fromkeys(BELOW_1.split(), ([0.0, 0.9999999], [-1e-9, 1.0])),
    "model.layers": ([1, 2**12], [0, 2**12 + 1]),
    "model.sequence": ([1, 2**24], [0, 2**24 + 1]),
    "model.image": ([1, 2**14], [0, 2**14 + 1]),
    "model.channels": ([1, 2**12], [0, 2**12 + 1]),
    "data.prefetch": ([1, 2**10], [0, 2**10 + 1]),
    "train.global_batch_size": ([1, 2**24], [0, 2**24 + 1]),
    "train.accumulation": ([1, 2**16], [0, 2**16 + 1]),
    "pipeline.microbatches": ([0, 2**16], [-1, 2**16 + 1]),
    "model.classes": ([2, LARGEST], [1, LARGEST + 1]),
    "model.rope_theta": ([1.0, 3e38], [0.999, 3.5e38]),
    **dict.fromkeys(
        ("model.embedding_multiplier", "model.residual_multiplier", "model.logits_divisor"),
        ([1.2e-38, 3.4e38], [0.0, 1e-39, 3.5e38]),
    ),
    "model.rotary_fraction": ([0.5, 1.0], [0.0, 1.000001]),
    "model.period": (["", "sliding,full-nope"], ["local", "full,", ",".join(["full"] * 65)]),
    "model.rope_scaling": (["none", "linear,factor=1.5"], ["", "ntk", "linear,factor=0.999", "none,factor=1"]),
    "model.lora_targets": (["", "q_proj", "up_proj, o_proj"], ["lm_head", "q_proj,", "Q_PROJ"]),
    "model.router_scale": ([1.2e-38, 3.4e38], [0.0, 1e-39, 3.5e38]),
    "model.capacity_factor": ([1e-9, 64.0], [0.0, 64.001]),
    "model.norm_eps": ([1.2e-38, 3.4e38], [0.0, 1e-39, 3.5e38]),
    "optimizer.learning_rate": ([1.2e-38, 3.4e38], [0.0, 1e-39, 3.5e38]),
    "optimizer.rates": (["", "a=0, head=1000"], ["head", "head=", "head=-0.1", "head=1000.1", "a=1,a=1", "a=1,"]),
    "optimizer.outer_rate": ([1.2e-38, 3.4e38], [0.0, 1e-39, 3.5e38]),
    **dict.fromkeys(("train.dpo_beta", "train.orpo_lambda"), ([1.2e-38, 3.4e38], [0.0, 1e-39, 3.5e38])),
    "optimizer.decay_fraction": ([0.0, 1.0], [-1e-9, 1.000001]),
    "data.validation_fraction": ([1e-9, 0.999999], [0.0, 1.0]),
    "train.epochs": ([0.0, 1e6], [-1e-9, 1.000001e6]),
    "train.seed": ([0, 2**32 - 1], [-1, 2**32]),
    "checkpoint.grace_seconds": ([1e-9, 31_536_000.0], [0.0, 31_536_001.0, math.inf]),
    "checkpoint.minutes": ([0.0, 525_600.0], [-1e-9, 525_601.0]),
    "fault.hang_seconds": ([0.0, 31_536_000.0], [-1e-9, 31_536_001.0]),
    "fault.heartbeat_seconds": ([1, 31_536_000], [0, 31_536_001]),
    "fault.start_seconds": ([1, 31_536_000], [0, 31_536_001]),
    "fault.notify": (
        ["", "http://h", "https://[::1]:8080/a?b=c#d"],
        ["h", "ftp://h/", "https://", "http://h:65536/", "http://[::1/", "http://a:b@h/", "http://h/a b", "http://h/ü"],
    ),
    "cluster.process_id": ([-1, LARGEST], [-2, LARGEST + 1]),
    "data.text": (["content", "a.b", "{a} {b}"], ["", "a..b", "{a", "{}"]),
    "parallel.zero": ([0, 1, 2, 3], [-1, 4]),
    "cluster.site": (["", "slurm", "zurich-2.a_b", "a" * 64], ["a b", "a/b", "ü", "a" * 65, "a\n"]),
    "resume": (["1", "auto", "never"], ["0", "-1", ""]),
    "parallel.gradient_compression": (["exact", "powersgd"], ["", "onebit-adam"]),
    "parallel.compression_density": ([1e-9, 1 - 1e-9], [0.0, 1.0]),
    "parallel.compression_rank": ([1, 1024], [0, 1025]),
}
"""Knob -> (the outermost legal values, the nearest that are not), written out here and not read from its type."""


def test_every_knob_with_bounds_has_its_edges_here():
    assert set(EDGES) == {name for name, knob in KNOBS.items() if knob.metadata}


@pytest.mark.parametrize("name", EDGES)
def test_edges_of_a_knob(name):
    legal, refused = EDGES[name]
    for value in legal:
        assert leaves(Config.model_validate(nest({name: value})))[name] == value
    for value in refused:
        with pytest.raises(ValidationError):
            Config.model_validate(nest({name: value}))


def test_of_very_many_unknown_names_the_first_are_listed_and_the_others_counted(tmp_path):
    """To look for the nearest name of each took 17 seconds."""
    path = tmp_path / "many.toml"
    keys = [f"unknown_{number} = 1" for number in range(9000)]
    path.write_text("\n".join([*keys, *(f"[section_{number}]" for number in range(9000))]))
    started = time.perf_counter()
    with pytest.raises(RequestError) as error:
        load(str(path), {f"unknown_{number}": "1" for number in range(9000)})
    problems = error.value.problems
    assert time.perf_counter() - started < 8
    of_file, of_line = problems[:21], problems[21:]
    assert of_file[0].startswith(f"{path}: unknown key 'unknown_0'; ")
    assert of_file[-1] == f"there are 17980 more unknown keys in {path}; correct these first"
    assert of_line[0].startswith("unknown option --unknown-0; ")
    assert of_line[-1] == "there are 8980 more unknown options; correct these first"


def test_a_mesh_of_very_many_axes_is_one_sentence(tmp_path):
    """Each of them had a sentence that repeated the whole text, at every check: minutes."""
    text = ",".join(f"axis{number}=2" for number in range(20000))
    with pytest.raises(RequestError, match=r"^mesh 'axis0=2,.{42}\.\.\.' names 20000 axes; there are 6: pipeline"):
        load(None, {"mesh": text})
