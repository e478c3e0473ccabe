"""Wrong requests: each gives a sentence that names the knob, the values and the remedy, and no other sentence."""

from __future__ import annotations

import pytest

from jaxdist import launch
from jaxdist.config import RequestError
from jaxdist.config.values import Count
from jaxdist.request import Extra, arguments, load
from jaxdist.request.knobs import ELSEWHERE, KNOBS
from tests.request.wrong import Wrong, named

ONE_KNOB = {
    "below its bound": Wrong("--model.layers -3", [("model.layers is -3: must be at least 1",)]),
    "fraction": Wrong("--model.dropout 1", [("model.dropout is 1", "less than 1")]),
    "not positive": Wrong("--optimizer.learning-rate 0", [("optimizer.learning_rate is 0: must be more than 0",)]),
    "nan": Wrong("--optimizer.learning-rate nan", [("optimizer.learning_rate is nan: must be a finite number",)]),
    "seed of 33 bits": Wrong("--train.seed 4294967296", [("train.seed is 4294967296: must be less than 4294967296",)]),
    "near choice": Wrong(
        "--parallel.offload optimiser",
        [("parallel.offload is 'optimiser': valid are none, optimizer; did you mean 'optimizer'?",)],
    ),
    "far choice": Wrong("--model.remat everything", [("model.remat is 'everything': valid are none, dots, block",)]),
    "words for a number": Wrong("--train.steps many", [("train.steps is 'many': must be a whole number",)]),
    "fraction for a whole": Wrong("--train.steps 2.5", [("train.steps is '2.5': must be a whole number",)]),
    "neither true nor false": Wrong("--model.tied maybe", [("model.tied is 'maybe': must be true or false",)]),
    "empty value": Wrong("--train.epochs=", [("train.epochs is empty: must be a number",)]),
    "long value": Wrong("--model.mlp " + "9" * 5000, [("model.mlp is '999", "...: unable")]),
    "no such stage": Wrong("--parallel.zero 4", [("parallel.zero is '4': valid are 0, 1, 2, 3",)]),
    "stage in words": Wrong("--parallel.zero full", [("parallel.zero is 'full': valid are 0, 1, 2, 3",)]),
    "near family": Wrong(
        "--model.family lama",
        [("'lama': valid are gpt, llama, gemma, moe, ", "cnn, resnet18, resnet50; did you mean 'llama'?")],
    ),
    "near precision": Wrong("--precision mix", [("mixed, float16, fp8; did you mean 'mixed'?",)]),
    "knob of text": Wrong("cnn_digits --model.heads 8", [("model.heads is 8, but model.family cnn does not use it",)]),
    "knob of images": Wrong("--model.classes 3", [("model.classes is 3, but model.family gpt does not use it",)]),
    "documents of images": Wrong(
        "cnn_digits --model.documents apart", [("model.documents is apart, but model.family cnn does not use it",)]
    ),
    "packing of images": Wrong(
        "cnn_digits --data.pack best-fit", [("data.pack is best-fit, but model.family cnn does not use it",)]
    ),
    "no crop of text": Wrong("--data.augment crop", [("data.augment is crop, but model.family gpt",)]),
    "split images": Wrong("cnn_digits --mesh 2x2x1", [("model=2, but model.family cnn has nothing", "to data")]),
    "no dropout": Wrong("--model.family resnet18 --model.dropout 0.1", [("resnet18, which has no dropout",)]),
    "rotary base": Wrong("--model.rope-theta 0", [("model.rope_theta is 0: must be more than 0",)]),
    "experts of another family": Wrong(
        "--model.family llama --model.experts 4 --model.router sigmoid --model.balance-rate 0",
        [
            ("model.experts is 4, but model.family llama, which has no experts, does not use it",),
            ("model.router is sigmoid", "llama, which has no experts"),
            ("model.balance_rate is 0.0", "llama, which has no experts"),
        ],
    ),
    "experts of images": Wrong(
        "cnn_digits --model.capacity-factor 2",
        [("model.capacity_factor is 2.0, but model.family cnn, which has no experts,",)],
    ),
    "an axis without experts": Wrong(
        "--mesh data=2,expert=2",
        [("mesh data=2,expert=2 has expert=2, but model.family gpt has no experts; give those devices to data",)],
    ),
    "little room": Wrong("moe_tiny --model.capacity-factor 0", [("model.capacity_factor is 0: must be more than 0",)]),
    "too much room": Wrong(
        "moe_tiny --model.capacity-factor 100", [("model.capacity_factor is 100: must be at most 64",)]
    ),
    "no such router": Wrong(
        "moe_tiny --model.router soft",
        [("model.router is 'soft': valid are softmax, sigmoid; did you mean 'softmax'?",)],
    ),
    "no experts at all": Wrong("moe_tiny --model.experts 0", [("model.experts is 0: must be at least 1",)]),
    "mesh of two numbers": Wrong("--mesh 2x2", [("mesh '2x2' has 2 in place of 3 numbers",)]),
    "mesh: each mistake": Wrong(
        "--mesh dat=2,replica=0", [("'dat' that does not exist", "'data'"), ("replica the size '0'",)]
    ),
    "mesh, and a batch that fails": Wrong(
        "--mesh 0x1x1 --train.global-batch-size 0", [("global_batch_size is 0", "at least 1"), ("data the size '0'",)]
    ),
}

NAMES = {
    "misspelt": Wrong("--model.layrs 4", [("unknown option --model.layrs; did you mean '--model.layers'?",)]),
    "as others call it": Wrong("--lr 0.1", [("unknown option --lr; did you mean '--optimizer.learning-rate'?",)]),
    "as others call it, in a section": Wrong("--train.lr 1", [("did you mean '--optimizer.learning-rate'?",)]),
    "as others call a dtype": Wrong("--dtype bfloat16", [("unknown option --dtype; did you mean '--precision'?",)]),
    "a bit similar": Wrong("--data.filn 1", [("unknown option --data.filn; valid names are --data.path, ",)]),
    "without its section": Wrong("--layers 4", [("--layers", "did you mean '--model.layers'?")]),
    "in a wrong section": Wrong("--train.learning-rate 1", [("did you mean '--optimizer.learning-rate'?",)]),
    "several of that name": Wrong(
        "--every 1", [("'--validation.every' or '--checkpoint.every' or '--log.every' or '--sample.every'?",)]
    ),
    "half a name": Wrong("--train.batch_size 1", [("--train.batch-size", "did you mean '--train.global-batch-size'?")]),
    "a section": Wrong("--model 4", [("model is a section; its knobs are --model.family, --model.layers",)]),
    "nothing near": Wrong("--qqq 4", [("unknown option --qqq", "--help")]),
    "nothing near in a section": Wrong(
        "--log.qqq 4", [("valid names are --log.every, --log.norms, --log.tensorboard",)]
    ),
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
    "files that the shell found": Wrong(
        "FILE FILE FILE",
        [("my.toml' and 1 more file; if the shell has expanded a pattern", "*.toml'")],
        "train.steps = 5",
    ),
    "data instead of a config": Wrong(__file__, [("not valid TOML", "; if it holds data, write --data.path /")]),
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
    "no such file": Wrong("a/b.toml", [("config 'a/b.toml' does not exist; name a TOML file",)]),
    "no such name": Wrong("zzz", [("config 'zzz' is neither", "valid names are apertus_70b, apertus_8b, cnn_digits")]),
    "folder": Wrong("FOLDER", [("config '", "' is a folder", "/config.toml")]),
    "no run": Wrong("", [("evaluate needs a RUN",)], positional="RUN"),
    "not a run": Wrong("none --train.steps 5", [("'none' does not exist",), ("no effect",)], positional="RUN"),
    "syntax": Wrong("FILE", [("my.toml is not valid TOML", "line 2")], "mesh = '1x1x1'\nmodel.layers 4"),
    "not utf-8": Wrong("FILE", [("my.toml is not valid TOML", "utf-8")], b"mesh = '\xff'"),
    "key of no section": Wrong(
        "FILE", [("my.toml: unknown key 'layers'; did you mean 'model.layers'?",)], "layers = 4"
    ),
    "device": Wrong("/dev/zero", [("config /dev/zero cannot be read: not a regular file",)]),
    "large file": Wrong("FILE", [("my.toml cannot be read: larger than 1 MiB",)], "#" * (1 << 20) + "\n"),
    "deep": Wrong("FILE", [("my.toml is not valid TOML", "nested too deeply")], "a = " + "[" * 99_999),
    "NUL in a path": Wrong("FILE", [("data.path is 'a\\x00b': has a NUL character",)], 'data.path = "a\\u0000b"'),
    "empty path": Wrong("FILE", [("data.path is empty: must be a path, or none",)], "data.path = ''"),
    "empty run folder": Wrong("--run-dir=", [("run_dir is empty: must be a path, or none",)]),
    "long path": Wrong("a/" * 2500, [("config 'a/a/", "is longer than 4000 bytes")]),
    "long run": Wrong("a/" * 2500, [("run folder 'a/a/", "is longer than 4000 bytes")], positional="RUN"),
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
    "several validation files": Wrong(
        "FILE", [("data.validation_path", "one text", '"a,b"')], 'data.validation_path = ["a", "b"]'
    ),
    "several files": Wrong("FILE", [("data.path", "one text", '"a,b"')], 'data.path = ["a", "b"]'),
    "several tokenizers": Wrong("FILE", [("data.tokenizer", "must be one path, in quotes")], 'data.tokenizer = ["a"]'),
    "number for a path": Wrong("FILE", [("data.path is 3: must be text, in quotes",)], "data.path = 3"),
    "list for a mesh": Wrong("FILE", [("mesh is [2, 1, 1]: must be text",)], "mesh = [2, 1, 1]"),
    "wrong though overridden": Wrong("FILE --train.steps 20", [("train.steps is -1",)], "train.steps = -1"),
}

COMBINATIONS = {
    "documents of nothing but tokens": Wrong(
        "--data.path no.bin --model.documents apart",
        [("'no.bin' does not exist",), ("nothing says which token of 'no.bin' ends a document", "data.tokenizer")],
    ),
    "packing of nothing but tokens": Wrong(
        "--data.path no.bin --data.pack best-fit",
        [("'no.bin' does not exist",), ("nothing says which token of 'no.bin' ends a document", "data.pack to cut")],
    ),
    "heads": Wrong("--model.heads 7", [("model.embed 128", "model.heads 7", "heads to 4 or 8", "embed to 126 or 133")]),
    "more heads than embed": Wrong(
        "--model.embed 2", [("model.embed 2", "model.heads 4", "heads to 2,", "embed to 4")]
    ),
    "accumulation": Wrong("--train.accumulation 3", [("global_batch_size 16", "train.accumulation 3;", "15 or 18")]),
    "mesh": Wrong("--mesh data=3,replica=2", [("16", "6 replica x data ranks (mesh data=3,replica=2)", "12 or 18")]),
    "mesh and accumulation": Wrong("--mesh 4x1x1 --train.accumulation 8", [("accumulation 8 x 4 data ranks", "to 32")]),
    "steps and epochs": Wrong("--train.steps 20 --train.epochs 2", [("steps 20 and train.epochs 2", "leave one")]),
    "steps and epochs in a file": Wrong("FILE", [("both set in the config",)], "train.steps = 20\ntrain.epochs = 1.5"),
    "long name": Wrong(f"--data.path {'x' * 300}", [("data.path", "more than 255 bytes")]),
    "long config": Wrong("x" * 300, [("has a name of more than 255 bytes",)]),
    "huge mesh": Wrong(f"--mesh {'9' * 5000}x1x1", [("gives data the size '99999999999999999999'", "1 to 999999")]),
    "too many devices": Wrong(
        "--mesh 2000x2x999 --train.global-batch-size 2000 --model.layers 999",
        [("mesh '2000x2x999' asks for 3996000 devices; at most 1048576",)],
    ),
    "huge embed": Wrong(
        "--model.embed 2147483644",
        [("model.layers 4, model.embed 2147483644, model.heads 4, model.vocab 2048", "2.21e+20 parameters; at most")],
    ),
    "huge together": Wrong(
        "llama_70b --model.layers 4096 --model.embed 65536 --model.mlp 262144", [("2.51e+14 parameters; at most",)]
    ),
    "huge number": Wrong("--model.layers 99999999999999999999", [("model.layers", "must be at most 4096")]),
    "huge number in a file": Wrong("FILE", [("not valid TOML",)], f"mesh = {'9' * 5000}"),
    "endless epochs": Wrong("--train.epochs 1e308", [("train.epochs", "at most 1e+06")]),
    "phases": Wrong(
        "--optimizer.schedule constant --optimizer.decay_fraction 0.9 --optimizer.warmup 30",
        [("optimizer.warmup 30", "0.9 x train.steps 150 = 135", "lower one")],
    ),
    "final of nothing": Wrong(
        "--optimizer.schedule constant --optimizer.decay_fraction 0 --optimizer.final 0.5",
        [("optimizer.final is 0.5", "does not use it")],
    ),
    "no steps": Wrong("--train.steps 0", [("train.steps and train.epochs are both 0",)]),
    "warm-up": Wrong("--train.steps 9 --optimizer.warmup 10", [("optimizer.warmup 10", "train.steps 9")]),
    "beta2 of sgd": Wrong("--optimizer.name sgd --optimizer.beta2 0.9", [("beta2 is 0.9", "sgd does not use it")]),
    "decay": Wrong("--optimizer.decay-fraction 0.5", [("decay_fraction is 0.5", "schedule cosine", "default is 0.2")]),
    "small vocabulary": Wrong("--model.vocab 256", [("model.vocab 256", "257 or more")]),
    "no data": Wrong(
        "--data.path no.txt --data.tokenizer no.json", [("data.path 'no.txt'",), ("tokenizer 'no.json'",)]
    ),
    "data is a folder": Wrong("--data.path .", [("data.path '.' is a folder without files",)]),
    "validation alone": Wrong("--data.validation-path FILE", [("validation_path", "data.path is not set")], "x"),
    "unused fraction": Wrong(
        "--data.path my.toml --data.validation-path a.txt --data.validation-fraction 0.5",
        [("validation_fraction is 0.5", "does not use it"), ("validation_path 'a.txt' does not exist",)],
        "some text",
    ),
    "run folder is a file": Wrong("--run-dir FILE", [("my.toml' cannot be a folder",)], "x"),
    "run folder under a file": Wrong("--run-dir FILE/run", [("my.toml/run' cannot", "is a file")], "x"),
    "adapters of images": Wrong("cnn_digits --model.lora-rank 4", [("lora_rank is 4", "family cnn does not use it")]),
    "adapters without a rank": Wrong("--model.lora-dropout 0.1", [("lora_dropout is 0.1", "lora_rank 0 does not")]),
    "adapter of the output": Wrong(
        "llama_1b --model.lora-rank 4 --model.lora-targets q_proj,lm_head", [("'lm_head' gets no adapter", "o_proj")]
    ),
    "adapters of experts": Wrong(
        "moe_tiny --model.lora-rank 4 --model.lora-targets q_proj,up_proj",
        [("names up_proj", "has experts in its place", "choose among q_proj, k_proj, v_proj, o_proj")],
    ),
    "adapter of a gate that is not there": Wrong(
        "--model.lora-rank 4 --model.lora-targets gate_proj", [("names gate_proj", "gpt has no such weight")]
    ),
    "a quantized base without adapters": Wrong("--model.lora-base nf4", [("lora_base is nf4", "lora_rank 0 does not")]),
    "a quantized base of experts": Wrong(
        "moe_tiny --model.lora-rank 4 --model.lora-base int8",
        [("lora_base is int8", "family moe has experts", "lora_base to bfloat16")],
    ),
    "a quantized base of odd width": Wrong(
        "--model.lora-rank 4 --model.lora-base nf4 --model.embed 96 --model.heads 4",
        [("blocks are 64 numbers", "model.embed, but that is 96", "lora_base to bfloat16")],
    ),
    "adapters wider than the model": Wrong("--model.lora-rank 129", [("lora_rank 129 is more than model.embed 128",)]),
    "adapters in local steps": Wrong(
        "--model.lora-rank 4 --train.local-steps 2 --mesh replica=2", [("local_steps is 2", "lora_rank 4 freezes")]
    ),
    "adapters in PipeDream": Wrong(
        "--model.lora-rank 4 --mesh 1x1x2 --pipeline.schedule pipedream --optimizer.clip 0",
        [("pipeline.schedule is pipedream", "lora_rank 4 freezes", "pipeline.schedule to 1f1b")],
    ),
    "packed pairs": Wrong("--train.objective dpo --data.pack best-fit", [("objective is dpo", "data.pack to cut")]),
    "pairs of which all is learned": Wrong(
        "--train.objective dpo --data.learn all",
        [("rows of none of the data are conversations",), ("objective is dpo", "data.learn to assistant or last")],
    ),
    "pairs of a mixture": Wrong(
        "--train.objective dpo --data.mixture a*1,b*1",
        [("'a' does not exist",), ("'b' does not exist",), ("objective is dpo", "one source", "in one data.path")],
    ),
    "pairs in local steps": Wrong(
        "--train.objective dpo --train.local-steps 2 --mesh replica=2", [("objective is dpo", "local_steps to 0")]
    ),
    "pairs in PipeDream": Wrong(
        "--train.objective dpo --mesh 1x1x2 --pipeline.schedule pipedream --optimizer.clip 0",
        [("objective is dpo", "pipedream", "pipeline.schedule to 1f1b")],
    ),
    "a pair on two devices": Wrong(
        "--train.objective dpo --mesh 4x1x1 --train.global-batch-size 12",
        [("gives each device 3 rows", "both rows of a pair", "global_batch_size to 8 or 16")],
    ),
    "pairs of images": Wrong("cnn_digits --train.objective dpo", [("objective is dpo", "family cnn does not use it")]),
    "a beta of no pairs": Wrong("--train.dpo-beta 0.2", [("dpo_beta is 0.2", "objective cross-entropy does not use")]),
    "samples of nothing": Wrong("--sample.every 5", [("sample.every is 5", "sample.prompts has no text")]),
    "samples never": Wrong("--sample.prompts def", [("sample.prompts is 'def'", "sample.every 0", "not use it")]),
    "samples of images": Wrong("cnn_digits --sample.every 5", [("sample.every is 5", "cnn writes no text")]),
    "no wandb": Wrong("--log.wandb lab", [("log.wandb is 'lab'", "pip install 'jaxdist[wandb]'")]),
}

SEVERAL = {
    "of every part at once": Wrong(
        "llama_8b --mesh 3x3x1 --model.kv-heads 5 --model.dropout 0.5 --parallel.rules.vocab modle --parallel.zero 5",
        [
            ("parallel.zero is '5'",),
            ("model.dropout is 0.5",),
            ("model.heads 32 does not divide by model.kv_heads 5",),
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
        "gone.toml --model.family gpt --model.embed 255 --model.heads 2 --model.head-dim 0",
        [("config 'gone.toml'",), ("model.heads 2",)],
    ),
}

CASES = named(
    {
        "knob": ONE_KNOB,
        "name": NAMES,
        "file": FILES,
        "combination": COMBINATIONS,
        "several": SEVERAL,
    }
)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_mistake_is_told(case: Wrong, tmp_path, monkeypatch):
    case.assert_told(tmp_path, monkeypatch)


def test_folder_without_permission(monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(RequestError, match=r"run_dir 'runs/gpt_tiny' cannot be written: no permission"):
        arguments([], "train", "")


SECONDS = ("checkpoint.grace_seconds", "fault.hang_seconds", "fault.heartbeat_seconds", "fault.start_seconds")


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", ["1e308", "31536001", "99999999999999999999", "-1", "nan"])
def test_waits_of_more_than_a_year_are_refused(name, value):
    with pytest.raises(RequestError) as error:
        load(None, {name: value})
    assert f"{name} is {value}" in str(error.value) or f"{name} is '{value}'" in str(error.value)


@pytest.mark.parametrize("value", ["1e308", "525601", "-1"])
def test_minutes_of_more_than_a_year_are_refused(value):
    with pytest.raises(RequestError, match=r"checkpoint.minutes is "):
        load(None, {"checkpoint.minutes": value})
    with pytest.raises(RequestError, match="--minutes is "):
        launch.main(["local", "--processes=1", f"--minutes={value}"])


def test_what_others_call_a_knob_is_none_of_ours_and_names_one():
    assert set(ELSEWHERE.values()) <= set(KNOBS)
    words = {name.rpartition(".")[2] for name in KNOBS}
    # The word of a knob leads to that knob already, but for `data.dtype`, which few mean.
    assert words & set(ELSEWHERE) <= {"dtype"}
