"""What makes a step smaller, and by how much."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config
from jaxdist.mesh import DATA, PIPELINE, micro_batches
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.planning import memory
from jaxdist.request.checks.registry import closest, divisors
from jaxdist.sharding import Layout

MOST = 3


def smaller(config: Config, model: Model | Foreign, layout: Layout) -> list[str]:
    """The knobs that, changed alone, save most: `model.remat to block (3.1 GiB predicted)`, best first."""
    now = memory.predict(config, model, layout).total
    found = [
        (memory.predict(_with(config, name, value), model, layout).total, f"{name} to {value}")
        for name, value in _changes(config, layout)
    ]
    told = [(memory.size(total), change) for total, change in sorted(found)[:MOST] if total < now]
    return [f"{change} ({size} predicted)" for size, change in told if size != memory.size(now)]


def _changes(config: Config, layout: Layout) -> Iterator[tuple[str, object]]:
    """Knobs and values that are legal here and not asked for yet; all leave the layout of the model as it is."""
    train, parallel = config.train, config.parallel
    pipelined = layout.size(PIPELINE) > 1
    k = micro_batches(config, dict(layout.axes))
    rows = train.global_batch_size // (k * layout.ranks)
    schedule = config.pipeline.schedule if pipelined else ""
    if config.model.remat not in ("block", "stage", "offload") and not config.model.images and schedule != "zb-h1":
        yield "model.remat", "block"
    if pipelined and config.model.remat != "stage" and schedule not in ("zb-h1", "zb-u"):
        yield "model.remat", "stage"
    if schedule == "gpipe":
        yield "pipeline.schedule", "1f1b"
    if parallel.zero < 3 and layout.size(DATA) > 1:
        yield "parallel.zero", 3
    for times in closest(divisors(rows), 1) if schedule != "pipedream" else ():
        yield "pipeline.microbatches" if pipelined else "train.accumulation", k * times
    if pipelined:
        return
    outside = parallel.micro_batches == "outside" or config.model.images  # whose layers are not looked into
    if parallel.zero >= 2 and train.accumulation > 1 and not outside:
        yield "parallel.micro_batches", "outside"


def _with(config: Config, name: str, value: object) -> Config:
    section, _, field = name.partition(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={field: value})})
