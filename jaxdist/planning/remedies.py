"""Changes that make a step fit into the memory of a device. Each is predicted before it is proposed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from jaxdist.config import RequestError
from jaxdist.mesh import CONTEXT, DATA, EXPERT, MODEL, ZERO_AXES, abstract_mesh, describe
from jaxdist.mesh.context import SHORTEST_PART
from jaxdist.mesh.split import Split
from jaxdist.output import units
from jaxdist.output.units import closest, divisors, remedy
from jaxdist.planning import memory
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.request.checks import check_mesh_fits
from jaxdist.sharding import Layout

MOST = 3
"""Changes of a single knob that are proposed, at most."""

WIDEST = 64
"""The number of devices of the largest mesh that is tried, over that of the present one."""

NONE = "no other setting is predicted to fit, on up to {} times as many devices; choose a smaller model"

Change = tuple[str, object]
"""A knob and its new value."""


def advice(sharded: ShardedModel, room: float, others: Sequence[str] = ()) -> str:
    """Return a sentence such as `set model.remat to block (3.1 GiB predicted), or ...`.

    It names what fits into `room` bytes; `others` come last.
    """
    ways = [*fitting(sharded, room), *others]
    if not ways:
        return NONE.format(WIDEST)
    return remedy(*ways)


def fitting(sharded: ShardedModel, room: float) -> list[str]:
    """Return changes with which the step fits into `room` bytes, such as `model.remat to block (3.1 GiB predicted)`.

    First come the knobs that are enough alone, those that save most before the others; where none is, all that save
    something together. Then come the same devices with parts of rows in the place of rows, and with experts in the
    place of tensors, and last the smallest of the larger meshes.
    """
    now = memory.predict(sharded).total
    saving = []
    for change in _changes(sharded.split):
        total = memory.predict(sharded.with_knobs(dict([change]))).total
        if total < now:
            saving.append((total, _to(change), change))
    # By the memory that the step would need, and by name where that is equal.
    saving.sort(key=lambda row: row[:2])
    found = [_with_total(text, total) for total, text, _ in saving if total <= room][:MOST]
    # No knob is enough alone.
    if not found:
        found = _together(sharded, room, [change for _, _, change in saving])
    return [
        *found,
        *_parts_for_rows(sharded, room),
        *_experts_for_tensors(sharded, room),
        *_larger_mesh(sharded, room),
    ]


def _together(sharded: ShardedModel, room: float, changes: Sequence[Change]) -> list[str]:
    """Apply the changes in order, each only where it saves more, until the step fits; empty if it never does."""
    taken: list[Change] = []
    total = memory.predict(sharded).total
    for name, value in changes:
        changed = sharded.with_knobs({name: value})
        smaller = memory.predict(changed).total
        if smaller >= total or name in dict(taken):
            continue
        sharded = changed
        total = smaller
        taken.append((name, value))
        if total <= room:
            return [_with_total(" with ".join(map(_to, taken)), total)]
    return []


def _parts_for_rows(sharded: ShardedModel, room: float) -> list[str]:
    """Return the first mesh whose devices have parts of rows in the place of rows, if the step fits there.

    As many more micro-batches follow each other, so that a device has fewer tokens at once.
    """
    split = sharded.split
    config = split.config
    data = split.size(DATA)
    # PipeDream has one micro-batch.
    if config.model.images or not split.flush:
        return []
    knob = split.micro_batches_knob
    for times in divisors(data)[1:]:
        more = times * split.micro_batches
        other = split.with_knobs({knob: more}).on(**{DATA: data // times, CONTEXT: times * split.row_parts})
        if other.length < SHORTEST_PART:
            return []
        found = _on_mesh(sharded, other, room, f" with {_to((knob, more))}")
        if found:
            return found
    return []


def _experts_for_tensors(sharded: ShardedModel, room: float) -> list[str]:
    """Return the mesh that spreads experts over the devices that now split tensors, if the step fits there.

    Devices that split tensors have the same tokens, and each sends all of them to their experts.
    """
    split = sharded.split
    if not split.config.model.traits.routed or split.size(MODEL) == 1:
        return []
    return _on_mesh(sharded, split.on(**{EXPERT: split.size(EXPERT, MODEL), MODEL: 1}), room)


def _larger_mesh(sharded: ShardedModel, room: float) -> list[str]:
    """Return the first larger mesh on which the step fits, fewest devices first; only one axis grows."""
    split = sharded.split
    times = 2
    while times <= WIDEST:
        for _, grown in split.grown(times):
            found = _on_mesh(sharded, grown, room)
            if found:
                return found
        times *= 2
    return []


def _on_mesh(sharded: ShardedModel, other: Split, room: float, also: str = "") -> list[str]:
    """Return the mesh of `other`, if the model divides over it and the step fits there; `also` is changed too."""
    if not _divides(other):
        return []
    layout = Layout.of(other, abstract_mesh(other.shape), sharded.layout)
    total = memory.predict(ShardedModel(other, sharded.model, layout)).total
    if total > room:
        return []
    return [_with_total(f"the mesh to {describe(other.shape).replace(' ', ',')}{also}", total)]


def _divides(split: Split) -> bool:
    try:
        check_mesh_fits(split)
    except RequestError:
        return False
    return True


def _to(change: Change) -> str:
    name, value = change
    return f"{name} to {value}"


def _with_total(text: str, total: int) -> str:
    return f"{text} ({units.size(total)} predicted)"


def _changes(split: Split) -> Iterator[Change]:
    """Yield legal changes that may save memory; all leave the layout of the model as it is."""
    config = split.config
    parallel = config.parallel
    sizes = config.model
    pipelined = split.pipelined
    not_recomputed = config.pipeline.traits.not_recomputed if pipelined else ()

    if sizes.remat not in ("block", "stage", "offload") and not sizes.images and "block" not in not_recomputed:
        yield "model.remat", "block"
    if pipelined and sizes.remat != "stage" and "stage" not in not_recomputed:
        yield "model.remat", "stage"
    if sizes.traits.routed and sizes.capacity_factor > 1:
        yield "model.capacity_factor", 1.0
    if pipelined and config.pipeline.schedule == "gpipe":
        yield "pipeline.schedule", "1f1b"
    if parallel.zero < 3 and split.size(*ZERO_AXES) > 1:
        yield "parallel.zero", 3
    if split.flush:
        for times in closest(divisors(split.rows), 1):
            yield split.micro_batches_knob, split.micro_batches * times
    if split.inside and split.micro_batches > 1:
        yield "parallel.micro_batches", "outside"
