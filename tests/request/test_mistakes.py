"""Wrong requests: each gives a sentence that names the knob, the values and the remedy, and no other sentence."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

import pytest

from jaxdist.config import Count, RequestError
from jaxdist.request import Extra, arguments


@dataclass
class Wrong:
    """A command line and what each sentence has to contain; FILE is the path of a config with the text `toml`, FOLDER
    that of its folder."""

    argv: str
    sentences: list[tuple[str, ...]]
    toml: str | bytes | None = None
    positional: str = "CONFIG"
    extras: list[Extra] = field(default_factory=list)


ONE_KNOB = {
    "below its bound": Wrong("--model.layers -3", [("model.layers is -3: must be at least 1",)]),
    "fraction": Wrong("--model.dropout 1", [("model.dropout is 1", "less than 1")]),
    "not positive": Wrong("--optimizer.learning-rate 0", [("optimizer.learning_rate is 0: must be more than 0",)]),
    "nan": Wrong("--optimizer.learning-rate nan", [("optimizer.learning_rate is nan: must be a finite number",)]),
    "seed of 33 bits": Wrong("--train.seed 4294967296", [("train.seed is 4294967296: must be less than 4294967296",)]),
    "near choice": Wrong(
        "--optimizer.name adam", [("optimizer.name is 'adam': valid are adamw, lion, sgd; did you mean 'adamw'?",)]
    ),
    "far choice": Wrong("--model.remat everything", [("model.remat is 'everything': valid are none, dots, block",)]),
    "words for a number": Wrong("--train.steps many", [("train.steps is 'many': must be a whole number",)]),
    "fraction for a whole": Wrong("--train.steps 2.5", [("train.steps is '2.5': must be a whole number",)]),
    "neither true nor false": Wrong("--model.tied maybe", [("model.tied is 'maybe': must be true or false",)]),
    "empty value": Wrong("--train.epochs=", [("train.epochs is empty: must be a number",)]),
    "long value": Wrong("--model.mlp " + "9" * 5000, [("model.mlp is '999", "...: unable")]),
    "no such stage": Wrong("--parallel.zero 4", [("parallel.zero is '4': valid are 0, 1, 2, 3",)]),
    "stage in words": Wrong("--parallel.zero full", [("parallel.zero is 'full': valid are 0, 1, 2, 3",)]),
    "near family": Wrong("--model.family lama", [("'lama': valid are gpt, llama; did you mean 'llama'?",)]),
    "near precision": Wrong("--precision mix", [("auto, float32, bfloat16, mixed; did you mean 'mixed'?",)]),
    "rotary base": Wrong("--model.rope-theta 0", [("model.rope_theta is 0: must be more than 0",)]),
    "axis that is not built": Wrong("--mesh 1x2x3", [("pipeline=3", "not built yet; set pipeline to 1")]),
    "mesh of two numbers": Wrong("--mesh 2x2", [("mesh '2x2' has 2 number(s)",)]),
    "mesh: each mistake": Wrong(
        "--mesh dat=2,replica=0", [("'dat' that does not exist", "'data'"), ("replica the size '0'",)]
    ),
    "mesh, and a batch that fails": Wrong(
        "--mesh 0x1x1 --train.global-batch-size 0", [("global_batch_size is 0", "at least 1"), ("data the size '0'",)]
    ),
}

NAMES = {
    "misspelt": Wrong("--model.layrs 4", [("unknown option --model.layrs; did you mean '--model.layers'?",)]),
    "without its section": Wrong("--layers 4", [("--layers", "did you mean '--model.layers'?")]),
    "in a wrong section": Wrong("--train.learning-rate 1", [("did you mean '--optimizer.learning-rate'?",)]),
    "several of that name": Wrong("--every 1", [("'--validation.every' or '--checkpoint.every' or '--log.every'?",)]),
    "half a name": Wrong("--train.batch_size 1", [("--train.batch-size", "did you mean '--train.global-batch-size'?")]),
    "a section": Wrong("--model 4", [("model is a section; its knobs are --model.family, --model.layers",)]),
    "nothing near": Wrong("--qqq 4", [("unknown option --qqq", "--help")]),
    "nothing near in a section": Wrong("--log.qqq 4", [("valid names are --log.every, --log.tensorboard",)]),
    "without both its sections": Wrong("--vocab x", [("'--model.vocab' or '--parallel.rules.vocab'?",)]),
    "without its inner section": Wrong("--parallel.heads x", [("did you mean '--parallel.rules.heads'?",)]),
    "in a misspelt inner section": Wrong("--parallel.rulez.mlp x", [("did you mean '--parallel.rules.mlp'?",)]),
    "misspelt, two deep": Wrong("--parallel.rules.vocap x", [("did you mean '--parallel.rules.vocab'?",)]),
    "a section of a section": Wrong("--parallel.rules x", [("is a section; its knobs are --parallel.rules.heads,",)]),
    "nothing near, two deep": Wrong("--parallel.rules.qqq x", [("valid names are --parallel.rules.heads,",)]),
    "unknown twice": Wrong("--qqq 4 --qqq 5", [("given twice",), ("unknown option --qqq",)]),
    "no value": Wrong("--train.steps --model.layers 2", [("--train.steps needs a value",)]),
    "no value at the end": Wrong("--train.steps", [("--train.steps needs a value",)]),
    "twice": Wrong("--train.steps 5 --train.steps=6", [("--train.steps is given twice ('5' and '6')",)]),
    "twice, spelt otherwise": Wrong(
        "--train.global-batch-size 4 --train.global_batch_size 8", [("--train.global-batch-size is given twice",)]
    ),
    "stray word": Wrong("gpt_tiny train.steps=5", [("unexpected argument 'train.steps=5'", "--name value")]),
    "one hyphen": Wrong("gpt_tiny -x", [("unexpected argument '-x'",)]),
    "unknown flag": Wrong("--json", [("unknown option --json",)]),
    "misspelt extra": Wrong("--jsn", [("--jsn; did you mean '--json'?",)], extras=[Extra("json", False, "")]),
    "value for a flag": Wrong("--json=yes", [("--json takes no value",)], extras=[Extra("json", False, "")]),
    "extra of a wrong type": Wrong(
        "--max-tokens 0", [("--max-tokens is 0: must be at least 1",)], extras=[Extra("max_tokens", 5, "", Count)]
    ),
}

FILES = {
    "no such config": Wrong("gpt_tny", [("config 'gpt_tny' is neither", "did you mean 'gpt_tiny'?")]),
    "no such file": Wrong("a/b.toml", [("config 'a/b.toml'", "valid names are gpt2_124m, gpt_tiny, llama_1b")]),
    "folder": Wrong("FOLDER", [("config '", "' is a folder", "/config.toml")]),
    "no run": Wrong("", [("evaluate needs a RUN",)], positional="RUN"),
    "not a run": Wrong("none --train.steps 5", [("'none'", "no config.toml"), ("no effect",)], positional="RUN"),
    "syntax": Wrong("FILE", [("my.toml is not valid TOML", "line 2")], "mesh = '1x1x1'\nmodel.layers 4"),
    "not utf-8": Wrong("FILE", [("my.toml is not valid TOML", "utf-8")], b"mesh = '\xff'"),
    "key of no section": Wrong(
        "FILE", [("my.toml: unknown key 'layers'; did you mean 'model.layers'?",)], "layers = 4"
    ),
    "misspelt key": Wrong("FILE", [("'model.layrs'; did you mean 'model.layers'?",)], "[model]\nlayrs = 4"),
    "unknown section": Wrong("FILE", [("unknown section 'modle'; did you mean 'model'?",)], "[modle]\na = 1\nb = 2"),
    "section as a value": Wrong("FILE", [("unknown key 'model'; model is a section",)], "model = 3"),
    "value as a section": Wrong("FILE", [("train.steps is a table: must be a whole number",)], "[train.steps]"),
    "key twice": Wrong("FILE", [("model.layers is set twice",)], "model.layers = 1\n'model.layers' = 2"),
    "text for a number": Wrong("FILE", [("model.layers is '4': must be a whole number",)], "model.layers = '4'"),
    "number for a truth": Wrong("FILE", [("model.tied is 1: must be true or false",)], "model.tied = 1"),
    "truth for a number": Wrong("FILE", [("train.steps is true: must be a whole number",)], "train.steps = true"),
    "text for a stage": Wrong("FILE", [("parallel.zero is '3': valid are 0, 1, 2, 3",)], "parallel.zero = '3'"),
    "truth for a stage": Wrong("FILE", [("parallel.zero is true: must be a whole number",)], "parallel.zero = true"),
    "fraction for a stage": Wrong("FILE", [("parallel.zero is 3.0: must be a whole number",)], "parallel.zero = 3.0"),
    "number for an axis": Wrong(
        "FILE", [("parallel.rules.heads is 2: must be text, in quotes",)], "[parallel.rules]\nheads = 2"
    ),
    "inner section as a value": Wrong("FILE", [("parallel.rules is a section",)], "parallel.rules = 'model'"),
    "misspelt inner section": Wrong(
        "FILE", [("unknown section 'parallel.rulez'; did you mean 'parallel.rules'?",)], "[parallel.rulez]\nmlp = ''"
    ),
    "number for a path": Wrong("FILE", [("data.path is 3: must be text, in quotes",)], "data.path = 3"),
    "list for a mesh": Wrong("FILE", [("mesh is [2, 1, 1]: must be text",)], "mesh = [2, 1, 1]"),
    "wrong though overridden": Wrong("FILE --train.steps 20", [("train.steps is -1",)], "train.steps = -1"),
}

COMBINATIONS = {
    "heads": Wrong("--model.heads 7", [("model.embed 128", "model.heads 7", "heads to 4 or 8", "embed to 126 or 133")]),
    "more heads than embed": Wrong(
        "--model.embed 2", [("model.embed 2", "model.heads 4", "heads to 2,", "embed to 4")]
    ),
    "accumulation": Wrong("--train.accumulation 3", [("global_batch_size 16", "train.accumulation 3;", "15 or 18")]),
    "mesh": Wrong("--mesh data=3,replica=2", [("16", "6 data ranks (mesh data=3,replica=2)", "12 or 18")]),
    "mesh and accumulation": Wrong("--mesh 4x1x1 --train.accumulation 8", [("accumulation 8 x 4 data ranks", "to 32")]),
    "steps and epochs": Wrong("--train.steps 20 --train.epochs 2", [("steps 20 and train.epochs 2", "leave one")]),
    "steps and epochs in a file": Wrong("FILE", [("both set in the config",)], "train.steps = 20\ntrain.epochs = 1.5"),
    "long name": Wrong(f"--data.path {'x' * 300}", [("data.path", "more than 255 bytes")]),
    "long config": Wrong("x" * 300, [("is longer than a file's name can be",)]),
    "huge mesh": Wrong(f"--mesh {'9' * 5000}x1x1", [("gives data the size '99999999999999999999'", "1 to 999999")]),
    "huge number": Wrong("--model.layers 99999999999999999999", [("model.layers", "must be less than 2147483648")]),
    "huge number in a file": Wrong("FILE", [("not valid TOML",)], f"mesh = {'9' * 5000}"),
    "endless epochs": Wrong("--train.epochs 1e308", [("train.epochs", "at most 1e+06")]),
    "phases": Wrong(
        "--optimizer.schedule constant --optimizer.decay_fraction 0.9 --optimizer.warmup 30",
        [("optimizer.warmup 30", "0.9 x train.steps 150 = 135", "lower one")],
    ),
    "final of nothing": Wrong(
        "--optimizer.schedule constant --optimizer.decay_fraction 0 --optimizer.final 0.5",
        [("optimizer.final is 0.5", "makes no use of it")],
    ),
    "no steps": Wrong("--train.steps 0", [("train.steps and train.epochs are both 0",)]),
    "warm-up": Wrong("--train.steps 9 --optimizer.warmup 10", [("optimizer.warmup 10", "train.steps 9")]),
    "beta2 of sgd": Wrong("--optimizer.name sgd --optimizer.beta2 0.9", [("beta2 is 0.9", "sgd makes no use of it")]),
    "decay": Wrong("--optimizer.decay-fraction 0.5", [("decay_fraction is 0.5", "schedule cosine", "default is 0.2")]),
    "small vocabulary": Wrong("--model.vocab 256", [("model.vocab 256", "257 or more")]),
    "no data": Wrong(
        "--data.path no.txt --data.tokenizer no.json", [("data.path 'no.txt'",), ("tokenizer 'no.json'",)]
    ),
    "data is a folder": Wrong("--data.path .", [("data.path '.' is a folder",)]),
    "validation alone": Wrong("--data.validation-path FILE", [("validation_path", "data.path is not set")], "x"),
    "unused fraction": Wrong(
        "--data.path my.toml --data.validation-path a.txt --data.validation-fraction 0.5",
        [("validation_fraction is 0.5", "no use"), ("validation_path 'a.txt' does not exist",)],
        "some text",
    ),
    "run folder is a file": Wrong("--run-dir FILE", [("my.toml' cannot be a folder",)], "x"),
    "run folder under a file": Wrong("--run-dir FILE/run", [("my.toml/run' cannot", "is a file")], "x"),
    "no wandb": Wrong("--log.wandb lab", [("log.wandb is 'lab'", "pip install 'jaxdist[wandb]'")]),
}

LLAMA = "--model.family llama --model.embed 96 --model.heads 12 --model.kv-heads"

MODEL = {
    "kv heads": Wrong(f"{LLAMA} 5", [("model.heads 12 does not divide by model.kv_heads 5", "kv_heads to 4 or 6")]),
    "more kv heads than heads": Wrong(
        f"{LLAMA} 24", [("model.kv_heads 24; set model.kv_heads to 12, or model.heads to 24",)]
    ),
    "heads of odd size": Wrong(
        "--model.family llama --model.embed 60",
        [("embed 60 in 4 model.heads", "size 15", "heads to 3 or 5, or model.embed to 56 or 64")],
    ),
    "heads of llama": Wrong(
        "--model.family llama --model.heads 7", [("does not divide", "heads to 4 or 8", "embed to 126 or 140")]
    ),
    "kv heads of gpt": Wrong("--model.kv-heads 2", [("model.kv_heads is 2", "model.family gpt", "default is 0")]),
    "rotary base of gpt": Wrong("--model.rope-theta 1e4", [("rope_theta is 10000.0", "gpt", "default is 500000.0")]),
    "dropout of llama": Wrong(
        "--model.family llama --model.dropout 0.1", [("model.dropout is 0.1", "llama, which has no dropout", "0.0")]
    ),
}

SPLIT = {
    "heads, MLP and vocabulary": Wrong(
        "--mesh 1x3x1 --model.vocab 2050",
        [
            ("model.heads 4", "model=3 (mesh 1x3x1)", "; set the model axis to 2"),
            ("model.mlp 0, which means 512, does", "mlp to 510 or 513, or the model axis to 2"),
            ("model.vocab 2050", "2049 or 2052, or the model axis to 2, or parallel.rules.vocab to ''"),
        ],
    ),
    "more devices than heads": Wrong(
        "--mesh 1x8x1",
        [
            (
                "heads 4 does",
                "set model.heads to 8, or the model axis to 4",
            )
        ],
    ),
    "MLP alone": Wrong("--mesh 1x4x1 --model.mlp 510", [("model.mlp 510 does", "508 or 512, or the model axis to 2")]),
    "odd vocabulary": Wrong(
        "--mesh model=2 --model.vocab 50257", [("50257", "model=2 (mesh model=2)", "50256 or 50258")]
    ),
    "by a filled mesh's other axis": Wrong("--mesh -1x8x1", [("model.heads 4", "model=8 (mesh -1x8x1)")]),
    "sequence": Wrong(
        "--mesh 1x4x1 --parallel.sequence true --model.sequence 126",
        [("model.sequence 126", "124 or 128, or the model axis to 2, or parallel.sequence to false")],
    ),
    "kv heads": Wrong(
        f"{LLAMA} 3 --mesh 1x4x1",
        [
            (
                "kv_heads 3 can neither be split nor repeated evenly over model=4 (mesh 1x4x1)",
                "2 or 4, or the model axis",
            )
        ],
    ),
    "kv heads and a vocabulary": Wrong(
        f"{LLAMA} 4 --mesh 1x6x1 --model.vocab 2052 --model.mlp 300",
        [("model.kv_heads 4 can neither", "model.kv_heads to 3 or 6, or the model axis to 4 or 12")],
    ),
    "batch and heads": Wrong("--mesh 3x8x1", [("16 does not divide by 3 data ranks",), ("model.heads 4", "model=8")]),
}

PARALLEL = {
    "rule of an axis that does not exist": Wrong(
        "--parallel.rules.mlp modle", [("rules.mlp is 'modle', an axis that does not exist; did you mean 'model'?",)]
    ),
    "rule that says none": Wrong(
        "--parallel.rules.vocab none", [("vocab is 'none'", "valid names are model ('' leaves vocab whole)")]
    ),
    "rule of an axis that is not built": Wrong(
        "--parallel.rules.heads context", [("'context', but context parallelism is not built yet; use 'model', or ''",)]
    ),
    "rules of axes of the batch": Wrong(
        "--parallel.rules.heads data --parallel.rules.vocab replica",
        [("heads is 'data'", "split both rows and heads"), ("vocab is 'replica'", "split both rows and vocab")],
    ),
    "sequence without the MLP": Wrong(
        "--parallel.sequence true --parallel.rules.mlp=",
        [("rules.mlp is empty", "rules.mlp to 'model', or parallel.seq")],
    ),
    "sequence without its layers": Wrong(
        "FILE",
        [("parallel.rules.heads and parallel.rules.mlp are empty", "parallel.sequence to false")],
        "[parallel]\nsequence = true\nrules = {heads = '', mlp = ''}",
    ),
    "micro-batches of stage 0": Wrong(
        "--parallel.micro-batches outside", [("micro_batches is outside", "parallel.zero 0", "default is inside")]
    ),
    "micro-batches of stage 1": Wrong("--parallel.micro-batches outside --parallel.zero 1", [("parallel.zero 1",)]),
}

SEVERAL = {
    "of every part at once": Wrong(
        "llama_8b --mesh 3x3x1 --model.kv-heads 5 --model.dropout 0.5 --parallel.rules.vocab modle --parallel.zero 5",
        [
            ("parallel.zero is '5'",),
            ("model.heads 32 does not divide by model.kv_heads 5",),
            ("model.dropout is 0.5",),
            ("parallel.rules.vocab is 'modle'",),
            ("global_batch_size 512", "3 data ranks", "510 or 513"),
            ("model.heads 32", "model=3"),
            ("model.mlp 14336", "model=3"),
        ],
    ),
    "all kinds": Wrong(
        "FILE word --train.stepz 3 --model.heads 7 --log.every 0 --train.seed",
        [
            ("--train.seed needs a value",),
            ("unexpected argument 'word'",),
            ("unknown key 'layers'",),
            ("unknown section 'oops'",),
            ("train.global_batch_size is 'x'",),
            ("unknown option --train.stepz", "--train.steps"),
            ("log.every is 0",),
            ("model.heads 7",),
        ],
        "layers = 4\n[oops]\n[train]\nglobal-batch-size = 'x'\naccumulation = 3",
    ),
    "a wrong field is not told again": Wrong("--model.heads 0 --model.embed 255", [("model.heads is 0",)]),
    "nor is one without a value": Wrong("--model.embed 255 --model.heads", [("--model.heads needs a value",)]),
    "no file, so its sizes are unknown": Wrong("gone.toml --model.embed 255", [("config 'gone.toml'",)]),
    "but what stands on the command line is": Wrong(
        "gone.toml --model.embed 255 --model.heads 2", [("config 'gone.toml'",), ("model.heads 2",)]
    ),
}

TABLES = {
    "knob": ONE_KNOB,
    "name": NAMES,
    "file": FILES,
    "combination": COMBINATIONS,
    "model": MODEL,
    "split": SPLIT,
    "parallel": PARALLEL,
    "several": SEVERAL,
}
CASES = {f"{table}: {name}": case for table, cases in TABLES.items() for name, case in cases.items()}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_mistake_is_told(case: Wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    file = tmp_path / "my.toml"
    if case.toml is not None:
        file.write_bytes(case.toml if isinstance(case.toml, bytes) else case.toml.encode())
    argv = [word.replace("FILE", str(file)).replace("FOLDER", str(tmp_path)) for word in case.argv.split()]
    with pytest.raises(RequestError) as caught:
        arguments(argv, "evaluate", "", positional=case.positional, extras=case.extras)
    told = caught.value.problems
    assert len(told) == len(case.sentences), told
    for problem, fragments in zip(told, case.sentences, strict=True):
        assert all(fragment in problem for fragment in fragments), (problem, fragments)
        assert "\n" not in problem
        assert "Input should" not in problem
    assert sorted(os.listdir(tmp_path)) == ["my.toml"] * (case.toml is not None)


def test_folder_without_permission(monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(RequestError, match=r"run_dir 'runs/gpt_tiny' cannot be written: no permission"):
        arguments([], "train", "")


SIZES = re.compile(r"(model\.\w+|the model axis) to (\d+)(?: or (\d+))?")


@pytest.mark.parametrize("case", [*MODEL.values(), *SPLIT.values()], ids=[*MODEL, *SPLIT])
def test_sizes_that_are_offered_work(case: Wrong):
    """Each one alone takes back the sentence that offers it, and brings no other."""
    told = _problems(case.argv)
    for problem in told:
        for name, *sizes in SIZES.findall(problem):
            for size in filter(None, sizes):
                changed = f"--mesh model={size}" if name == "the model axis" else f"--{name} {size}"
                left = {text.split(";")[0] for text in _problems(case.argv, changed)}
                assert left < {text.split(";")[0] for text in told}, (problem, changed)


def _problems(argv: str, changed: str = "") -> list[str]:
    """What is wrong with `argv`, where `changed` takes the place of the option of its name."""
    words = argv.replace("_", "-").split()
    options = dict(zip(words[::2], words[1::2], strict=True))
    words = changed.replace("_", "-").split()
    options |= dict(zip(words[::2], words[1::2], strict=True))
    try:
        arguments([word for option in options.items() for word in option], "train", "")
    except RequestError as error:
        return error.problems
    return []
