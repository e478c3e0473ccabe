"""Wrong sizes and layouts: each gives a sentence that names the values, and what it offers works."""

from __future__ import annotations

import re

import pytest

from jaxdist.config import RequestError
from jaxdist.request import arguments
from tests.request.wrong import Wrong, named

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
        "--model.family llama --model.heads 7",
        [("does not divide", "heads to 4 or 8", "embed to 126 or 140", "head_dim to 18 or 20")],
    ),
    "given heads of odd size": Wrong(
        "--model.family llama --model.heads 7 --model.head-dim 15",
        [("model.head_dim 15 is odd", "llama rotate pairs; set model.head_dim to 14 or 16")],
    ),
    "kv heads of given size": Wrong(
        "--model.family llama --model.heads 7 --model.kv-heads 3 --model.head-dim 16",
        [("heads 7 does not divide by model.kv_heads 3; set model.kv_heads to 1 or 7, or model.heads to 6 or 9",)],
    ),
    "head size of gpt": Wrong("--model.head-dim 16", [("model.head_dim is 16", "model.family gpt", "default is 0")]),
    "head size does not mend gpt's heads": Wrong(
        "--model.heads 7 --model.head-dim 16", [("model.head_dim is 16",), ("model.embed 128", "model.heads 7")]
    ),
    "yarn of one speed": Wrong(
        "--model.family llama --model.rope-theta 1 --model.rope-scaling yarn,factor=4,original=64",
        [("model.rope_theta is 1", "yarn", "set model.rope_theta above 1, or model.rope_scaling to linear")],
    ),
    "longrope for heads of another size": Wrong(
        "--model.family llama --model.rope-scaling longrope,factor=2,original=64,short=1:1,long=2:2",
        [("longrope has 2 numbers in short and in long", "a head of 32 turned dims has 16 pairs")],
    ),
    "longrope for heads that are turned in part": Wrong(
        "--model.family llama --model.rotary-fraction 0.125 "
        "--model.rope-scaling longrope,factor=2,original=64,short=1:1:1,long=2:2:2",
        [("longrope has 3 numbers in short and in long", "a head of 4 turned dims has 2 pairs")],
    ),
    "kv heads of gpt": Wrong("--model.kv-heads 2", [("model.kv_heads is 2", "model.family gpt", "default is 0")]),
    "rotary base of gpt": Wrong("--model.rope-theta 1e4", [("rope_theta is 10000.0", "gpt", "default is 500000.0")]),
    "dropout of llama": Wrong(
        "--model.family llama --model.dropout 0.1", [("model.dropout is 0.1", "llama, which has no dropout", "0.0")]
    ),
}

MIXTURE = {
    "more experts of a token than there are": Wrong(
        "--model.family moe --model.experts 4 --model.experts-per-token 5",
        [
            (
                "model.experts_per_token 5 is more than model.experts 4",
                "set model.experts_per_token to 4, or model.experts to 5",
            )
        ],
    ),
    "no layer with experts": Wrong(
        "--model.family moe --model.dense-layers 4",
        [("model.dense_layers 4 leaves no layer with experts of model.layers 4; set model.dense_layers to 3",)],
    ),
    "stages without a layer with experts": Wrong(
        "--model.family moe --model.dense-layers 2 --mesh pipeline=4",
        [("model.dense_layers 2 leaves 2 layers with experts, fewer than the 4 stages", "layers to 6", "axis to 2")],
    ),
    "stages of forms and kinds": Wrong(
        "--model.family moe --model.dense-layers 1 --model.period sliding,full --model.window 8 --mesh pipeline=2",
        [("model.period has several kinds, of which a pipeline makes no stages; set pipeline to 1",)],
    ),
    "uneven groups": Wrong(
        "--model.family moe --model.router-group-score best --model.router-groups 3",
        [("model.experts 8 does not divide by model.router_groups 3; set model.router_groups to 2 or 4",)],
    ),
    "groups of one expert": Wrong(
        "--model.family moe --model.router-group-score best-two --model.router-groups 8 --model.router-groups-kept 2",
        [("adds the two best scores of a group", "set model.router_groups to at most 4")],
    ),
    "more groups kept than there are": Wrong(
        "--model.family moe --model.router-group-score best --model.router-groups 2 --model.router-groups-kept 3",
        [("model.router_groups_kept 3 is more than model.router_groups 2; set model.router_groups_kept to 2",)],
    ),
    "too few experts to choose from": Wrong(
        "--model.family moe --model.router-group-score best --model.router-groups 8",
        [("leaves 1 experts to choose from, and model.experts_per_token is 2; set model.router_groups_kept to 2",)],
    ),
    "latent attention without what RoPE turns, and with what it does not know": Wrong(
        "--model.family llama --model.kv-latent 16 --model.qkv-bias true --model.qk-norm head --model.kv-heads 2",
        [
            ("model.rope_dim is 0, but rotary positions rotate pairs", "set model.rope_dim to 2"),
            ("for each of model.heads 4, but model.kv_heads is 2; leave it out",),
            ("knows no model.qkv_bias true and no model.qk_norm head; leave it out",),
        ],
    ),
    "a quantized base of latent attention": Wrong(
        "--model.family llama --model.kv-latent 16 --model.rope-dim 8 --model.lora-rank 4 --model.lora-base nf4",
        [("model.kv_latent 16 makes attention latent, whose weights are not quantized", "set model.lora_base to")],
    ),
    "experts that the axis does not divide": Wrong(
        "--model.family moe --model.experts 6 --mesh expert=4 --train.global-batch-size 48",
        [
            (
                "model.experts 6 does not divide by expert=4 (mesh expert=4)",
                "set model.experts to 4 or 8, or the expert axis to 3",
            )
        ],
    ),
    "two widths": Wrong(
        "--model.family moe --model.mlp 64 --model.expert-mlp 32",
        [("model.mlp is 64, but model.family moe with model.expert_mlp 32 does not use it; leave it out",)],
    ),
    "width of experts": Wrong(
        "--model.family moe --model.expert-mlp 30 --mesh 1x4x1",
        [
            (
                "model.expert_mlp 30 does not divide by model=4",
                "set model.expert_mlp to 28 or 32, or the model axis to 2",
            )
        ],
    ),
    "width of experts that is that of an MLP": Wrong(
        "--model.family moe --model.mlp 30 --mesh 1x4x1", [("model.mlp 30 does not divide by model=4",)]
    ),
    "batch over experts": Wrong(
        "--model.family moe --mesh data=2,expert=4 --train.global-batch-size 12",
        [("train.global_batch_size 12 does not divide by 8 data x expert ranks (mesh data=2,expert=4); set it to 8",)],
    ),
    "norms of queries as in llama": Wrong(
        "--model.family gpt --model.qk-norm head", [("model.qk_norm is head, but model.family gpt",)]
    ),
}

SPLIT = {
    "heads and MLP": Wrong(
        "--mesh 1x3x1",
        [
            ("model.heads 4", "model=3 (mesh 1x3x1)", "; set the model axis to 2"),
            ("model.mlp 0, which means 512, does", "mlp to 510 or 513, or the model axis to 2"),
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
    "heads of given size": Wrong(
        "--mesh 1x4x1 --model.family llama --model.heads 6 --model.head-dim 16",
        [("model.heads 6 does not divide by model=4 (mesh 1x4x1); set model.heads to 4 or 8, or the model axis to 2",)],
    ),
    "MLP alone": Wrong("--mesh 1x4x1 --model.mlp 510", [("model.mlp 510 does", "508 or 512, or the model axis to 2")]),
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
    "kv heads beside other sizes": Wrong(
        f"{LLAMA} 4 --mesh 1x6x1 --model.mlp 300",
        [("model.kv_heads 4 can neither", "model.kv_heads to 3 or 6, or the model axis to 4 or 12")],
    ),
    "batch and heads": Wrong("--mesh 3x8x1", [("16 does not divide by 3 data ranks",), ("model.heads 4", "model=8")]),
}

PARALLEL = {
    "rule of an axis that does not exist": Wrong(
        "--parallel.rules.mlp modle", [("rules.mlp is 'modle', an axis that does not exist; did you mean 'model'?",)]
    ),
    "rule that says none": Wrong(
        "--mesh 1x2x1 --parallel.rules.vocab none",
        [("vocab is 'none'", "valid names are model ('' leaves vocab whole)")],
    ),
    "rule of the axis of the sequence": Wrong(
        "--mesh 1x2x1 --parallel.rules.heads context",
        [("heads is 'context', which splits the sequence", "both the sequence and heads; use 'model', or ''")],
    ),
    "rules of axes of the batch": Wrong(
        "--parallel.rules.heads data --parallel.rules.vocab replica",
        [("heads is 'data'", "split both rows and heads"), ("vocab is 'replica'", "split both rows and vocab")],
    ),
    "sequence without a model axis": Wrong(
        "--mesh 2x1x1 --parallel.sequence true",
        [("parallel.sequence is true, but mesh 2x1x1, whose model axis is 1, does not use it; leave it out",)],
    ),
    "sequence without the MLP": Wrong(
        "--mesh 1x2x1 --parallel.sequence true --parallel.rules.mlp=",
        [("rules.mlp is empty", "rules.mlp to 'model', or parallel.seq")],
    ),
    "sequence without its layers": Wrong(
        "FILE",
        [("parallel.rules.heads and parallel.rules.mlp are empty", "parallel.sequence to false")],
        "mesh = '1x2x1'\n[parallel]\nsequence = true\nrules = {heads = '', mlp = ''}",
    ),
    "micro-batches of stage 0": Wrong(
        "--parallel.micro-batches outside", [("micro_batches is outside", "parallel.zero 0", "default is inside")]
    ),
    "replicas that split no state": Wrong(
        "--mesh replica=2,data=2 --parallel.replica-zero false", [("replica_zero is false", "parallel.zero 0")]
    ),
    "no replicas to split over": Wrong(
        "--mesh 2x1x1 --parallel.zero 1 --parallel.replica-zero false", [("replica_zero is false", "mesh 2x1x1")]
    ),
    "one-bit Adam": Wrong(
        "--parallel.gradient-compression onebit-adam", [("1-bit Adam is not offered", "choose int8")]
    ),
    "a density of no rule": Wrong(
        "--mesh replica=2 --parallel.gradient-compression int8 --parallel.compression-density 0.1",
        [("compression_density is 0.1", "gradient_compression int8")],
    ),
    "a rank of no rule": Wrong(
        "--parallel.compression-rank 8", [("compression_rank is 8", "gradient_compression exact")]
    ),
    "compressed gradients of PipeDream": Wrong(
        "--mesh replica=2,pipeline=2 --pipeline.schedule pipedream --optimizer.clip 0 "
        "--parallel.gradient-compression int8",
        [("gradient_compression is int8", "pipedream", "pipeline.schedule to 1f1b")],
    ),
    "compressed gradients of a classifier with dropout": Wrong(
        "cnn_digits --mesh replica=2 --model.dropout 0.1 --parallel.gradient-compression int8",
        [("gradient_compression is int8", "set model.dropout to 0")],
    ),
    "local steps of PipeDream": Wrong(
        "--mesh replica=2,pipeline=2 --pipeline.schedule pipedream --optimizer.clip 0 --train.local-steps 10",
        [("local_steps is 10", "pipedream", "pipeline.schedule to 1f1b")],
    ),
    "local steps with batch statistics": Wrong(
        "cnn_digits --model.family resnet18 --mesh replica=2 --train.local-steps 10",
        [("local_steps is 10", "batch statistics of model.family resnet18")],
    ),
    "local steps of a classifier with dropout": Wrong(
        "cnn_digits --mesh replica=2 --model.dropout 0.1 --train.local-steps 10",
        [("local_steps is 10", "dropout of model.family cnn")],
    ),
    "local steps with delayed gradients": Wrong(
        "--mesh replica=2 --train.local-steps 10 --parallel.delayed-gradients true",
        [("local_steps is 10", "delayed_gradients is true")],
    ),
    "an outer step of no local steps": Wrong(
        "--mesh replica=2 --optimizer.outer-rate 0.7", [("outer_rate is 0.7", "train.local_steps 0")]
    ),
    "delayed gradients of PipeDream": Wrong(
        "--mesh replica=2,pipeline=2 --parallel.delayed-gradients true --pipeline.schedule pipedream "
        "--optimizer.clip 0",
        [("delayed_gradients is true", "pipedream", "pipeline.schedule to 1f1b")],
    ),
    "delayed gradients of a classifier": Wrong(
        "cnn_digits --mesh replica=2 --parallel.delayed-gradients true",
        [("delayed_gradients is true", "cnn has batch statistics", "delayed_gradients to false")],
    ),
    "experts that fit nothing": Wrong(
        "--model.family moe --model.experts 3 --model.experts-per-token 4 --mesh expert=2 --model.dropout 0.1",
        [("which has no dropout",), ("experts_per_token 4 is more",), ("experts 3 does not divide by expert=2",)],
    ),
    "micro-batches of stage 1": Wrong("--parallel.micro-batches outside --parallel.zero 1", [("parallel.zero 1",)]),
}

CASES = named({"model": MODEL, "mixture": MIXTURE, "split": SPLIT, "parallel": PARALLEL})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_mistake_is_told(case: Wrong, tmp_path, monkeypatch):
    case.assert_told(tmp_path, monkeypatch)


SIZES = re.compile(r"(model\.\w+|the (?:model|expert) axis) to (\d+)(?: or (\d+))?")


@pytest.mark.parametrize("case", [*MODEL.values(), *MIXTURE.values(), *SPLIT.values()], ids=[*MODEL, *MIXTURE, *SPLIT])
def test_sizes_that_are_offered_work(case: Wrong):
    """Each one alone takes back the sentence that offers it, and brings no other."""
    told = _problems(case.argv)
    for problem in told:
        for name, *sizes in SIZES.findall(problem):
            for size in filter(None, sizes):
                axis = re.fullmatch(r"the (\w+) axis", name)
                changed = f"--mesh {axis[1]}={size}" if axis else f"--{name} {size}"
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
