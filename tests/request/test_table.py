"""Every option of every command against a value of each class: refused in a sentence, or legal. No traceback, no hang.

A new option needs a place in `LEGAL`, and one that no command has any more must leave it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.request.commands import COMMANDS, Command, asked, make_values, options_of, spelt, without_work
from tests.request.commands import option as written

LEGAL = {
    "": (
        *("CONFIG", "RUN", "mesh", "precision", "resume", "init_from"),
        *("model.family", "model.layers", "model.embed", "model.heads", "model.rope_theta", "model.sequence"),
        *("model.rope_scaling", "model.qk_norm", "model.rotary_fraction", "model.norm", "model.norms"),
        *("model.residual", "model.activation", "model.gate", "model.embedding_multiplier"),
        *("model.residual_multiplier", "model.logits_divisor"),
        *("model.experts", "model.experts_per_token", "model.router", "model.router_renormalize"),
        *("model.router_scale", "model.balance_rate", "model.capacity_factor", "model.router_group_score"),
        *("model.router_groups", "model.router_groups_kept", "model.rope_pairs"),
        *(
            "model.documents",
            "model.attention",
            "model.remat",
            "model.lora_base",
            "model.classes",
            "model.image",
            "model.channels",
        ),
        *("parallel.gradient_compression", "parallel.compression_density", "parallel.compression_rank"),
        *("parallel.replica_zero", "parallel.micro_batches", "parallel.offload", "pipeline.schedule"),
        *("parallel.context", "parallel.rules.heads", "parallel.rules.mlp", "parallel.rules.vocab"),
        *("data.mixture", "data.validation_path", "data.validation_fraction", "data.text", "data.on_error"),
        *("data.dtype", "data.pack", "data.form", "data.learn", "data.long"),
        *("data.augment", "data.prefetch"),
        *("optimizer.name", "optimizer.schedule", "optimizer.decay_fraction", "optimizer.moments"),
        *("train.global_batch_size", "train.accumulation", "cluster.process_id"),
        *("optimizer.outer_rate", "train.objective", "train.dpo_beta", "train.orpo_lambda"),
        *("prompts", "chat", "system", "thinking", "top_p"),
        *("tokens", "samples", "cluster", "compare", "devices", "processes", "nodes", "time"),
        *("checkpoint.grace_seconds", "fault.heartbeat_seconds", "fault.start_seconds", "minutes", "seconds"),
        *("mode", "models", "parts", "schedule", "stages", "microbatches", "algorithm"),
        *("choices_skip", "choices_apart", "stride"),
        *("dry_run", "verify", "prune", "force", "adapter", "json", "why", "trade_off", "submit"),
        "form",
        *("largest", "spare", "network"),
    ),
    "zero": (
        "sample.every",  # without prompts
        *(
            "model.kv_heads",
            "model.window",  # as long as a row
            "model.head_dim",
            "model.qkv_bias",
            "model.tied",
            "model.dropout",
            "model.lora_rank",  # above the width
            "model.lora_alpha",  # without a rank, as the next
            "model.lora_dropout",
            "model.expert_mlp",
            "model.shared_experts",
            "model.kv_latent",
            "model.q_latent",
            "model.rope_dim",
            "model.value_dim",
            "model.shared_gate",
            "model.dense_layers",
            "model.unroll_layers",
            "model.balance_loss",
            "model.z_loss",
            "model.out_bias",
            "model.mlp_bias",
            "model.sliding_theta",
            "model.attention_multiplier",
            "model.attention_cap",
            "model.sinks",
            "model.logit_cap",
            "parallel.zero",
            "parallel.sequence",
        ),
        *("pipeline.microbatches", "pipeline.virtual_stages", "optimizer.warmup", "optimizer.beta1", "optimizer.beta2"),
        *(
            "train.epochs",
            "checkpoint.epochs",
            "checkpoint.minutes",
            "log.tensorboard",
            "log.norms",
            "cluster.processes",
        ),
        *("train.deterministic", "fault.hang_seconds", "optimizer.outer_momentum", "parallel.delayed_gradients"),
        "data.changed",
        *("gpus_per_node", "tasks_per_node", "cpus_per_task", "virtual_stages", "zero"),
    ),
    "huge": (
        *("model.vocab", "model.norm_eps", "optimizer.learning_rate", "train.steps", "train.max_skipped"),
        *("checkpoint.keep", "log.every", "checkpoint", "repeats", "steps", "repetition_penalty"),
    ),
    "zero huge": (
        "model.positions",
        *("model.mlp", "optimizer.final", "optimizer.weight_decay", "optimizer.clip", "train.seed"),
        *("validation.every", "validation.batches", "checkpoint.every", "checkpoint.keep_every"),
        *("temperature", "top_k", "seed", "train.local_steps", "restarts", "spares", "warmup", "rows"),
        *("price", "deadline", "train.spike", "train.max_raised", "fault.compare", "fault.rollbacks"),
    ),
    "empty": (
        *("log.wandb", "profile.steps", "data.skip", "optimizer.rates"),
        "sample.prompts",  # without sample.every
        "model.lora_targets",  # without a rank
        "model.period",
        "dtype",
        *(
            "mount",
            "fault.notify",
            "cluster.coordinator",
            "target",
            "picture",
            "why_not",
            "fit",
            "fit_out",
            "out",
            "choices",
        ),
    ),
    "empty binary": ("env",),
    "word negative zero huge nan empty fifo folder binary": ("cluster.site",),
    "binary": ("PATH", "data.path", "data.tokenizer"),
    "word negative zero huge nan unicode folder": ("run_dir",),
    "word negative zero huge nan unicode empty binary": ("save", "output"),
    "word negative zero huge nan unicode empty folder": ("export",),  # replaces a file with --force only
    "word negative zero huge long nan fifo folder binary": ("partition", "account"),
    "word negative zero huge nan unicode empty fifo folder binary": ("container",),
    "word negative zero huge long nan unicode empty fifo folder binary": ("job_name",),
    "word zero huge nan fifo folder binary": ("image", "claim"),
    "word negative zero huge long nan unicode nul fifo folder binary": ("prompt", "stop"),
}
"""The classes of values that an option takes -> the options; the files and folders of `make_values` are there."""

OF_COMMAND = {
    ("data", "export"): "empty",  # of tokens, which the text without a tokenizer has not
    ("plan", "tokens"): "zero huge",  # of a run, and not of an answer
    ("explain", "devices"): "zero",  # as many as the mesh names
    ("explain", "cluster"): "empty",  # that of the GPU
    ("bench gpu", "rows"): "zero",  # of a step; elsewhere of an epoch
    ("launch slurm", "checkpoint.grace_seconds"): "",  # longer than the job
    ("launch slurm", "cluster.site"): "empty",  # or slurm: one word would be that of all tasks
    ("launch kubernetes", "job_name"): "word nan empty fifo folder binary",  # a name of DNS
    **{("evaluate", f"data.{name}"): "word negative zero huge nan unicode fifo folder binary" for name in
       ("path", "tokenizer")},  # looked at when the run's own model is known
    ("evaluate", "data.text"): "word negative zero huge long nan unicode nul fifo folder binary",  # likewise
    ("evaluate", "data.validation_path"): "binary",  # is read alone; elsewhere it needs data.path beside it
    **{(command, "optimizer.warmup"): "zero huge" for command in ("explain", "plan", "bench step", "bench scaling")},
    # They have no local steps, whose outer step alone uses it.
    **{(command, "optimizer.outer_rate"): "huge" for command in ("bench step", "bench scaling")},
    # Of an export, and of pruning, which are not asked for.
    **{("checkpoints", name): "" for name in ("checkpoint", "checkpoint.keep", "checkpoint.keep_every")},
    ("doctor", "cluster.coordinator"): "word negative zero huge long nan unicode empty nul fifo folder binary",
    ("doctor", "cluster.processes"): "zero huge",  # the doctor tells what is wrong with them among its findings
    ("doctor", "cluster.process_id"): "zero huge",
    ("doctor", "resume"): "huge",  # the doctor enters no run folder
    ("doctor", "init_from"): "word negative zero huge nan unicode fifo folder binary",
}  # fmt: skip
"""(command, option) -> the classes that the option takes there, where it is not as in `LEGAL`."""

ROWS = {name: classes.split() for classes, names in LEGAL.items() for name in names}

IDS = [f"{command.name} {command.argument}".strip() for command in COMMANDS]


@pytest.fixture
def values(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_values(tmp_path)


def legal(command: Command, name: str) -> list[str]:
    if (command.name, name) in OF_COMMAND:
        return OF_COMMAND[command.name, name].split()
    return ROWS[name]


def words(command: Command, name: str, value: str) -> list[str]:
    """The command line that gives the option, or the argument, this value."""
    if name in ("CONFIG", "RUN", "PATH"):
        return [value, *command.words]
    others = [word for word in command.words if not word.startswith(f"{written(name)}=")]
    return [*(["run"] if command.argument == "RUN" else []), *others, spelt(name, value)]


def names_of(command: Command) -> list[str]:
    return [*([command.argument] if command.argument else []), *options_of(command).names]


def test_every_option_has_a_row_and_every_row_an_option():
    found = {name for command in COMMANDS for name in names_of(command)}
    assert sum(map(len, LEGAL.values())) == len(ROWS), "an option stands twice"
    assert found == set(ROWS)
    assert {command for command, _ in OF_COMMAND} <= {command.name for command in COMMANDS}


CALLED = {"RUN": "config", "PATH": "data.path", "resume": "go back to step"}
"""Options that a sentence calls something else: for the doctor, what is no RUN is a CONFIG."""


def named(name: str, value: str, problems: list[str]) -> bool:
    """Whether one of the sentences speaks of the option and shows the value, or its beginning; 0 may mean false."""
    last = name.rpartition(".")[2]
    forms = {name, written(name), last, last.replace("_", "-"), CALLED.get(name, name)}
    shown = {value[:20], ascii(value[:20])[1:-1], repr(value[:20])[1:-1]} if value else {"empty", "''", "is missing"}
    shown |= {"is false"} if value == "0" else set()
    return any(
        any(form.lower() in problem.lower() for form in forms) and any(one in problem for one in shown)
        for problem in problems
    )


def marks_of(command: Command) -> list:
    """`launch slurm` has what the other launchers have, and more."""
    if command.name in ("launch local", "launch kubernetes"):
        return [pytest.mark.exhaustive]
    return [] if command.name == "train" else [pytest.mark.slow]


@pytest.mark.parametrize("command", [pytest.param(one, marks=marks_of(one)) for one in COMMANDS], ids=IDS)
def test_each_value_is_refused_or_legal(command, values):
    wrong = []
    names = names_of(command)
    with without_work():
        for name in names:
            for kind, value in values.items():
                problems = asked(command, *words(command, name, value))
                expected = kind in legal(command, name)
                if expected != (problems is None):
                    wrong.append(f"{name}, {kind}: {problems or 'legal'}")
                elif problems is not None and not named(name, value, problems):
                    wrong.append(f"{name}, {kind}: not told: {problems}")
    assert not wrong, "\n".join(wrong)


PARTS = 3

PROCESSES = [
    pytest.param(
        command,
        part,
        id=f"{name}-{part}",
        marks=pytest.mark.slow if place % 4 == 0 and place % PARTS == part else pytest.mark.exhaustive,
    )
    for place, (command, name) in enumerate(zip(COMMANDS, IDS, strict=True))
    for part in range(PARTS)
]
"""A third of the classes for every fourth command, and all with `--exhaustive`: their sentences are judged above, and
how a process ends with them is the same code for all."""


@pytest.mark.parametrize(("command", "part"), PROCESSES)
def test_a_process_refuses_them_with_2_and_without_a_traceback(command, part, values, tmp_path):
    """All options of a class together, in one process: the sentences of what is found first are told together."""
    names = [name for name in names_of(command) if name not in ("CONFIG", "RUN", "PATH")]
    for kind, value in list(values.items())[part::PARTS]:
        refused = [name for name in names if kind not in legal(command, name)]
        if kind == "nul" or not refused:  # no process can be given a NUL
            continue
        argument = ["run"] if command.argument == "RUN" else []
        argv = [*command.name.split(), *argument, *(spelt(name, value) for name in refused)]
        done = subprocess.run(
            [sys.executable, "-m", f"jaxdist.{argv[0]}", *map(os.fsencode, argv[1:])],
            stdin=subprocess.DEVNULL, capture_output=True, timeout=20, check=False,
        )  # fmt: skip
        said = done.stderr.decode(errors="replace")
        assert (done.returncode, done.stdout) == (2, b""), (kind, said)
        assert "Traceback" not in said, said
        assert all(line.startswith("jaxdist.") for line in said.splitlines()), said
