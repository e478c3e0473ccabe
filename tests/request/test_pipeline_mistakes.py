"""Wrong pipelines: each gives a sentence that names the values, and what it offers works."""

import pytest

from jaxdist.config import RequestError
from jaxdist.request import arguments
from tests.request.wrong import Wrong

MISTAKES = {
    "more stages than layers": Wrong(
        "--mesh 1x1x8 --pipeline.microbatches 8",
        [("model.layers 4", "8 stages of mesh 1x1x8", "model.layers to 8, or the pipeline axis to 4")],
    ),
    "more chunks than layers": Wrong(
        "--mesh 1x1x2 --pipeline.schedule interleaved --pipeline.virtual-stages 3",
        [("2 stages x 3 virtual stages", "layers to 6", "virtual_stages to 2", "pipeline.schedule to 1f1b")],
    ),
    "chunks of a schedule that has none": Wrong(
        "--mesh 1x1x2 --pipeline.virtual-stages 2",
        [("virtual_stages is 2, but pipeline.schedule 1f1b has one stage", "to 1, or pipeline.schedule to inter")],
    ),
    "no chunks": Wrong(
        "--mesh 1x1x2 --pipeline.schedule interleaved --pipeline.virtual-stages 1",
        [("virtual_stages is 1, but pipeline.schedule interleaved needs at least 2",)],
    ),
    "a batch too small for the micro-batches": Wrong(
        "--mesh 2x1x2 --train.global-batch-size 8",
        [("global_batch_size 8", "pipeline.microbatches 8 x 2 data ranks", "set it to 16")],
    ),
    "a model without blocks": Wrong(
        "cnn_digits --mesh 2x1x2", [("pipeline=2, but model.family cnn is not a stack of equal blocks", "to data")]
    ),
    "micro-batches of an asynchronous schedule": Wrong(
        "--mesh 1x1x2 --pipeline.schedule pipedream --optimizer.clip 0 --pipeline.microbatches 4",
        [("microbatches is 4, but pipeline.schedule pipedream has a global batch as its one", "batch_size by 4")],
    ),
    "clipping, and a copy, of what is never whole": Wrong(
        "--mesh 1x1x2 --pipeline.schedule pipedream --precision mixed",
        [
            ("optimizer.clip is 1", "no norm to clip by", "set optimizer.clip to 0, or pipeline.schedule to 1f1b"),
            ("precision is mixed, but pipeline.schedule pipedream keeps several versions", "precision to bfloat16"),
        ],
    ),
    "accumulation": Wrong(
        "--mesh 1x1x2 --train.accumulation 4", [("train.accumulation is 4", "set pipeline.microbatches to 4")]
    ),
    "micro-batches outside": Wrong(
        "--mesh 2x1x2 --parallel.zero 3 --parallel.micro-batches outside", [("micro_batches is outside", "schedule")]
    ),
    "a schedule without a pipeline": Wrong(
        "--mesh 2x2x1 --pipeline.schedule gpipe", [("pipeline.schedule is gpipe, but mesh 2x2x1", "axis is 1")]
    ),
    "stages recomputed without a pipeline": Wrong(
        "--model.remat stage", [("model.remat is stage, but mesh -1x1x1 has no stages; set it to block",)]
    ),
    "inputs of layers in the host's memory": Wrong(
        "--mesh 1x1x2 --model.remat offload",
        [("remat is offload, but a pipeline (mesh 1x1x2) holds", "stage or block")],
    ),
    "layers without a loop": Wrong(
        "--mesh 1x1x2 --model.unroll-layers true",
        [("model.unroll_layers is true, but mesh 1x1x2, whose stages loop", "leave it out")],
    ),
    "moments in the host's memory": Wrong(
        "--mesh 1x1x2 --pipeline.schedule pipedream --optimizer.clip 0 --parallel.offload optimizer",
        [
            (
                "offload is optimizer, but pipeline.schedule pipedream updates",
                "offload to none, or pipeline.schedule to 1f",
            )
        ],
    ),
    "zero bubbles that recompute stages": Wrong(
        "--mesh 1x1x2 --pipeline.schedule zb-u --model.remat stage", [("remat is stage, but", "zb-u keeps", "to 1f1b")]
    ),
    "zero bubbles that recompute blocks": Wrong(
        "--mesh 1x1x2 --pipeline.schedule zb-h1 --model.remat block", [("waits in every tick", "zb-u or interleaved")]
    ),
    "a whole vocabulary beside a split sequence": Wrong(
        "--mesh 1x2x2 --parallel.sequence true --parallel.rules.vocab=",
        [("rules.vocab is ''", "splits the vocabulary too", "it to model, or parallel.sequence to false")],
    ),
    "near schedule": Wrong("--mesh 1x1x2 --pipeline.schedule 1fb1", [("did you mean '1f1b'?",)]),
    "split by the pipeline": Wrong(
        "--mesh 1x1x2 --parallel.rules.mlp pipeline", [("parallel.rules.mlp is 'pipeline', which splits the layers",)]
    ),
}


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES)
def test_every_mistake_is_told(case, tmp_path, monkeypatch):
    case.assert_told(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "argv",
    [
        "--mesh 1x1x8 --model.layers 8",
        "--mesh 1x1x4",
        "--mesh 1x1x2 --pipeline.schedule interleaved --pipeline.virtual-stages 2",
        "--mesh 1x1x2 --pipeline.microbatches 4 --model.remat stage",
        "--mesh 2x1x2 --train.global-batch-size 16",
        "--mesh 1x1x2 --pipeline.schedule zb-u --model.remat block --pipeline.virtual-stages 2",
        "--mesh 1x1x3",  # layers that do not divide are padded
        "--mesh 1x1x2 --model.vocab 2049",  # and so is a vocabulary
    ],
)
def test_what_is_offered_works(argv):
    try:
        arguments(argv.split(), "train", "")
    except RequestError as error:
        pytest.fail(str(error.problems))
