"""Changes that make a step fit into the memory of a device. Each is predicted before it is proposed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxdist.config import Config, RequestError
from jaxdist.mesh import AXES, CONTEXT, DATA, EXPERT, MODEL, PIPELINE, ZERO_AXES, abstract_mesh, describe
from jaxdist.mesh.context import SHORTEST_PART
from jaxdist.mesh.split import Split
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.output import units
from jaxdist.output.units import closest, divisors, remedy
from jaxdist.planning import memory
from jaxdist.request.checks import check_mesh_fits
from jaxdist.sharding import Layout

MOST = 3
"""Changes of a single knob that are proposed, at most."""

WIDEST = 64
"""The number of devices of the largest mesh that is tried, over that of the present one."""

NONE = "no other setting is predicted to fit, on up to {} times as many devices; choose a smaller model"

Change = tuple[str, object]
"""A knob and its new value."""


def advice(config: Config, model: Model | Foreign, layout: Layout, room: float, others: Sequence[str] = ()) -> str:
    """Return a sentence such as `set model.remat to block (3.1 GiB predicted), or ...`.

    It names what fits into `room` bytes; `others` come last.
    """
    ways = [*fitting(config, model, layout, room), *others]
    if not ways:
        return NONE.format(WIDEST)
    return remedy(*ways)


def fitting(config: Config, model: Model | Foreign, layout: Layout, room: float) -> list[str]:
    """Return changes with which the step fits into `room` bytes, such as `model.remat to block (3.1 GiB predicted)`.

    First come the knobs that are enough alone, those that save most before the others; where none is, all that save
    something together. Then come the same devices with parts of rows in the place of rows, and with experts in the
    place of tensors, and last the smallest of the larger meshes.
    """
    now = memory.predict(config, model, layout).total
    saving = []
    for change in _changes(config, layout):
        total = memory.predict(_with(config, *change), model, layout).total
        if total < now:
            saving.append((total, _to(change), change))
    # By the memory that the step would need, and by name where that is equal.
    saving.sort(key=lambda row: row[:2])
    found = [_with_total(text, total) for total, text, _ in saving if total <= room][:MOST]
    # No knob is enough alone.
    if not found:
        found = _together(config, model, layout, room, [change for _, _, change in saving])
    return [
        *found,
        *_parts_for_rows(config, model, layout, room),
        *_experts_for_tensors(config, model, layout, room),
        *_larger_mesh(config, model, layout, room),
    ]


def _together(
    config: Config, model: Model | Foreign, layout: Layout, room: float, changes: Sequence[Change]
) -> list[str]:
    """Apply the changes in order, each only where it saves more, until the step fits; empty if it never does."""
    taken: list[Change] = []
    total = memory.predict(config, model, layout).total
    for name, value in changes:
        changed = _with(config, name, value)
        smaller = memory.predict(changed, model, layout).total
        if smaller >= total or name in dict(taken):
            continue
        config = changed
        total = smaller
        taken.append((name, value))
        if total <= room:
            return [_with_total(" with ".join(map(_to, taken)), total)]
    return []


def _parts_for_rows(config: Config, model: Model | Foreign, layout: Layout, room: float) -> list[str]:
    """Return the first mesh whose devices have parts of rows in the place of rows, if the step fits there.

    As many more micro-batches follow each other, so that a device has fewer tokens at once.
    """
    here = {axis: layout.size(axis) for axis in AXES}
    knob = _micro_batches_knob(config, layout)
    for times in divisors(here[DATA])[1:]:
        context = here[CONTEXT] * times
        if config.model.images or not knob or config.model.sequence < SHORTEST_PART * context:
            return []
        more = times * Split(config, here).micro_batches
        shape = here | {DATA: here[DATA] // times, CONTEXT: context}
        found = _on_mesh(_with(config, knob, more), model, layout, room, shape, f" with {_to((knob, more))}")
        if found:
            return found
    return []


def _experts_for_tensors(config: Config, model: Model | Foreign, layout: Layout, room: float) -> list[str]:
    """Return the mesh that spreads experts over the devices that now split tensors, if the step fits there.

    Devices that split tensors have the same tokens, and each sends all of them to their experts.
    """
    here = {axis: layout.size(axis) for axis in AXES}
    if not config.model.traits.routed or here[MODEL] == 1:
        return []
    return _on_mesh(config, model, layout, room, here | {EXPERT: here[EXPERT] * here[MODEL], MODEL: 1})


def _larger_mesh(config: Config, model: Model | Foreign, layout: Layout, room: float) -> list[str]:
    """Return the first larger mesh on which the step fits, fewest devices first; only one axis grows."""
    here = {axis: layout.size(axis) for axis in AXES}
    times = 2
    while times <= WIDEST:
        # The simpler change comes first.
        axes = [DATA, MODEL]
        if config.model.sequence >= SHORTEST_PART * here[CONTEXT] * times:
            axes.insert(1, CONTEXT)
        if config.model.traits.routed:
            axes.insert(1, EXPERT)
        for axis in axes:
            found = _on_mesh(config, model, layout, room, here | {axis: here[axis] * times})
            if found:
                return found
        times *= 2
    return []


def _on_mesh(
    config: Config, model: Model | Foreign, layout: Layout, room: float, shape: dict[str, int], also: str = ""
) -> list[str]:
    """Return a mesh of this shape, if the model divides over it and the step fits there; `also` is changed too."""
    if not _divides(config, shape):
        return []
    other = Layout.of(Split(config, shape), abstract_mesh(shape), Like(layout))
    total = memory.predict(config, model, other).total
    if total > room:
        return []
    return [_with_total(f"the mesh to {describe(shape).replace(' ', ',')}{also}", total)]


def _divides(config: Config, shape: dict[str, int]) -> bool:
    try:
        check_mesh_fits(Split(config, shape))
    except RequestError:
        return False
    return True


@dataclass(frozen=True)
class Like:
    """A device of the same kind as those of `layout`."""

    layout: Layout

    @property
    def platform(self) -> str:
        """The platform, as JAX names it."""
        return self.layout.platform

    @property
    def compute_capability(self) -> str:
        """The CUDA compute capability, such as `9.0`."""
        return ".".join(map(str, self.layout.capability))


def _to(change: Change) -> str:
    name, value = change
    return f"{name} to {value}"


def _with_total(text: str, total: int) -> str:
    return f"{text} ({units.size(total)} predicted)"


def _changes(config: Config, layout: Layout) -> Iterator[Change]:
    """Yield legal changes that may save memory; all leave the layout of the model as it is."""
    parallel = config.parallel
    sizes = config.model
    pipelined = layout.size(PIPELINE) > 1
    not_recomputed = config.pipeline.traits.not_recomputed if pipelined else ()

    if sizes.remat not in ("block", "stage", "offload") and not sizes.images and "block" not in not_recomputed:
        yield "model.remat", "block"
    if pipelined and sizes.remat != "stage" and "stage" not in not_recomputed:
        yield "model.remat", "stage"
    if sizes.traits.routed and sizes.capacity_factor > 1:
        yield "model.capacity_factor", 1.0
    if pipelined and config.pipeline.schedule == "gpipe":
        yield "pipeline.schedule", "1f1b"
    if parallel.zero < 3 and layout.size(*ZERO_AXES) > 1:
        yield "parallel.zero", 3
    knob = _micro_batches_knob(config, layout)
    if knob:
        k = Split(config, dict(layout.axes)).micro_batches
        rows = config.train.global_batch_size // (k * layout.ranks)
        for times in closest(divisors(rows), 1):
            yield knob, k * times
    # The layers of models of images are not known, so that their micro-batches always run outside.
    outside = parallel.micro_batches == "outside" or sizes.images
    if not pipelined and parallel.zero >= 2 and config.train.accumulation > 1 and not outside:
        yield "parallel.micro_batches", "outside"


def _micro_batches_knob(config: Config, layout: Layout) -> str:
    """Return the knob of the number of micro-batches; empty for PipeDream, which has one."""
    if layout.size(PIPELINE) == 1:
        return "train.accumulation"
    return "" if config.pipeline.asynchronous else "pipeline.microbatches"


def _with(config: Config, name: str, value: object) -> Config:
    """Return `config` with one knob changed."""
    section, _, field = name.partition(".")
    return config.model_copy(update={section: getattr(config, section).model_copy(update={field: value})})
