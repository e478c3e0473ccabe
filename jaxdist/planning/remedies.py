"""The changes that make a step fit into the memory of a device. Each is predicted before it is offered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxdist import units
from jaxdist.config import Config, RequestError
from jaxdist.mesh import AXES, DATA, MODEL, PIPELINE, abstract_mesh, describe, micro_batches
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.planning import memory
from jaxdist.request.checks import check_mesh_fits
from jaxdist.sharding import Layout, rules
from jaxdist.units import closest, divisors, remedy

MOST = 3
"""Changes of one knob that are offered."""

WIDEST = 64
"""Times as many devices as there are, up to which a larger mesh is looked for."""

NONE = "no other setting is predicted to fit, on up to {} times as many devices; choose a smaller model"

Change = tuple[str, object]
"""A knob and its new value."""


def advice(config: Config, model: Model | Foreign, layout: Layout, room: float, others: Sequence[str] = ()) -> str:
    """`set model.remat to block (3.1 GiB predicted), or ...`: what fits into `room` bytes, `others` behind it."""
    ways = [*fitting(config, model, layout, room), *others]
    return remedy(*ways) if ways else NONE.format(WIDEST)


def fitting(config: Config, model: Model | Foreign, layout: Layout, room: float) -> list[str]:
    """`model.remat to block (3.1 GiB predicted)`: changes with which the step fits into `room` bytes of a device.

    First the knobs that are enough alone, those that save most before the others; where none is, all that save
    something together. Then the smallest of the larger meshes.
    """
    now = memory.predict(config, model, layout).total
    found = [(memory.predict(_with(config, *one), model, layout).total, one) for one in _changes(config, layout)]
    saving = sorted(((total, _to(one)), one) for total, one in found if total < now)
    told = [_told(text, total) for (total, text), _ in saving if total <= room][:MOST]
    if not told:
        told = _together(config, model, layout, room, [one for _, one in saving])
    return [*told, *_larger_mesh(config, model, layout, room)]


def _together(
    config: Config, model: Model | Foreign, layout: Layout, room: float, changes: Sequence[Change]
) -> list[str]:
    """The changes in this order, each beside those before it where it saves more, until the step fits."""
    taken: list[Change] = []
    total = memory.predict(config, model, layout).total
    for name, value in changes:
        other = _with(config, name, value)
        smaller = memory.predict(other, model, layout).total
        if smaller >= total or name in dict(taken):
            continue
        config, total = other, smaller
        taken.append((name, value))
        if total <= room:
            return [_told(" with ".join(map(_to, taken)), total)]
    return []


def _larger_mesh(config: Config, model: Model | Foreign, layout: Layout, room: float) -> list[str]:
    """The first of the meshes with more devices on one axis, fewest devices first, on which the step fits."""
    here = {axis: layout.size(axis) for axis in AXES}
    times = 2
    while times <= WIDEST:
        for axis in (DATA, MODEL):
            shape = here | {axis: here[axis] * times}
            if _divides(config, shape):
                wider = Layout.on(abstract_mesh(shape), rules(config, shape), Like(layout))
                total = memory.predict(config, model, wider).total
                if total <= room:
                    return [_told(f"the mesh to {describe(shape).replace(' ', ',')}", total)]
        times *= 2
    return []


def _divides(config: Config, shape: dict[str, int]) -> bool:
    try:
        check_mesh_fits(config, shape)
    except RequestError:
        return False
    return True


@dataclass(frozen=True)
class Like:
    """A device like those of `layout`."""

    layout: Layout

    @property
    def platform(self) -> str:
        return self.layout.platform

    @property
    def compute_capability(self) -> str:
        return ".".join(map(str, self.layout.capability))


def _to(change: Change) -> str:
    name, value = change
    return f"{name} to {value}"


def _told(text: str, total: int) -> str:
    return f"{text} ({units.size(total)} predicted)"


def _changes(config: Config, layout: Layout) -> Iterator[Change]:
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
