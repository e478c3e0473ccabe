"""A pipeline of four H100s that are not there, with every schedule and kind of activation checkpointing."""

from jaxdist.explain import explain
from jaxdist.explaining.report import Report
from jaxdist.request import load

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-u")

REMATS = ("none", "dots", "block", "stage")

PAIRS = [
    (schedule, remat)
    for schedule in SCHEDULES
    for remat in REMATS
    if (schedule, remat) not in [("zb-h1", "block"), ("zb-h1", "stage"), ("zb-u", "stage")]
]
"""The 17 that a request may have: with `block`, ranks of `zb-h1` wait for the one that recomputes; and a backward pass
in two pieces cannot run a whole stage again."""

SIZES = {
    "layers": "16",
    "embed": "1024",
    "mlp": "4096",
    "heads": "16",
    "kv_heads": "8",
    "vocab": "32000",
    "sequence": "2048",
}
"""Sizes with which layers hold most of the memory."""


def compiled(schedule: str, remat: str, **pipeline: str) -> Report:
    """The step for 16 micro-batches of one row, in bfloat16; `pipeline` are further knobs of it."""
    asked = {
        "mesh": "1x1x4",
        "pipeline.schedule": schedule,
        "pipeline.microbatches": "16",
        "model.remat": remat,
        "train.global_batch_size": "16",
        "train.accumulation": "1",
        **{f"model.{name}": size for name, size in SIZES.items()},
        **{f"pipeline.{name}": value for name, value in pipeline.items()},
    }
    return explain(load("llama_1b", asked), "h100")


def temporaries(report: Report) -> tuple[int, int]:
    """(predicted, compiled) bytes of a step that are not its arguments."""
    return report.memory.total - report.memory.arguments, report.program.temporary_bytes
