"""Predict the key-value cache of generation, from the configuration alone, and say where it does not fit."""

from __future__ import annotations

from dataclasses import replace

from jaxdist.mesh.split import cached_heads_of
from jaxdist.models.decoding import slots_of
from jaxdist.output.units import counted, size
from jaxdist.parallel.pipeline.stages import Stages, stages_of
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.sharding import SEQUENCE


def cache_bytes(sharded: ShardedModel, rows: int, length: int | None = None) -> int:
    """Return the bytes of the cache on each device for a number of rows on the mesh: exact.

    S is `length`, the tokens of a row that the cache holds; without it, `model.sequence`. There are L S K (H + U)
    numbers in the compute dtype for each row (Shazeer 2019, section 2.4.1), over the devices that share them: rows over
    the batch, S over `context`, L over `pipeline`, and K over `model`, where fewer heads than devices are repeated.
    Uneven stages are padded. In layers with a sliding window, S is that window (`slots_of`).
    """
    sizes = sharded.config.model
    layout = sharded.layout
    stages = stages_of(sharded.split)
    if stages is None:
        stages = Stages.cut(sizes.layers, 1, 1, len(sizes.kinds))
    own_rows = -(-rows // layout.ranks)
    parts = layout.parts(SEQUENCE)
    slots = [slots_of(kind, length or sizes.sequence, parts) // parts for kind in sizes.kinds]
    of_layers = stages.virtual * sum(stages.places_of(kind) * slots[kind] for kind in range(stages.period))
    kept = cached_heads_of(sizes, layout.parts("heads")).keys_and_values
    return of_layers * own_rows * kept * sharded.split.width


def keeps_whole(sharded: ShardedModel, room: float | None, beside: int) -> bool:
    """Return whether generation gathers the weights of ZeRO 3 once, and not in each layer for each token.

    It does where they take at most half of what `beside` leaves of the `room` bytes of a device. On a GPU it then also
    copies the weights of each layer into arrays of their own.
    """
    return room is not None and _weight_bytes(sharded, whole=True) <= (room - beside) / 2


def weight_bytes(sharded: ShardedModel, room: float | None, beside: int = 0) -> int:
    """Return the bytes of the weights that a device holds in the compute dtype, as generation keeps them."""
    return _weight_bytes(sharded, sharded.config.parallel.zero < 3 or keeps_whole(sharded, room, beside))


def _weight_bytes(sharded: ShardedModel, whole: bool) -> int:
    parameters = replace(sharded, layout=sharded.layout.with_whole_rows()).parameters
    elements = [parameter.use if whole else parameter.rest for parameter in parameters]
    widths = [parameter.width(sharded.config) for parameter in parameters]
    return sum(count * width for count, width in zip(elements, widths, strict=True))


def problem(sharded: ShardedModel, rows: int, room: float | None, beside: int = 0, length: int | None = None) -> str:
    """Return why a device with `room` bytes cannot hold weights and cache for a number of rows; empty if it can.

    `beside` are the bytes of a train state that stays there meanwhile; `length` as in `cache_bytes`.
    """
    cache = cache_bytes(sharded, rows, length)
    weights = weight_bytes(sharded, room, beside)
    if room is None or cache + weights + beside <= room:
        return ""
    state = f" and {size(beside)} of the train state" if beside else ""
    tokens = length or sharded.config.model.sequence
    return (
        f"the key-value cache of {counted(rows, 'row')} of {counted(tokens, 'token')} takes {size(cache)} "
        f"on each device, beside {size(weights)} of weights{state}, and a device has {size(room)}; generate fewer "
        f"or shorter texts at once, lower model.sequence, or take a mesh with more devices"
    )
