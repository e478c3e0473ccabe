"""How every parameter is laid out over the mesh: which elements a device holds, and what could not be split."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax

from jaxdist.config import Config
from jaxdist.mesh import DATA, MODEL, micro_batches
from jaxdist.models import Model
from jaxdist.parallel import zero
from jaxdist.planning import pipelines
from jaxdist.planning.pipelines import pipeline_of
from jaxdist.sharding import LAYERS, Layout, name_of
from jaxdist.units import closest, divisors, multiples, remedy, to

STACKED = "blocks"
"""The group of parameters whose first dim counts the layers."""

MUCH = 0.1
"""From this part of the parameters on, what data leaves whole is worth a warning."""


@dataclass(frozen=True)
class Placed:
    """One parameter on a mesh."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    place: zero.Placement
    rest: int
    """Elements that a device holds at rest."""
    use: int
    """Elements that a device holds in use, of all its layers."""
    layers: int = 1
    """Layers that a device holds, padding included; 1 of what is no layer."""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def at_once(self) -> int:
        """Elements in use where one layer after the other is."""
        return self.use // self.layers

    @property
    def stacked(self) -> bool:
        """Whether the first dim counts the layers."""
        return self.name.partition(".")[0] == STACKED

    @property
    def whole(self) -> bool:
        """Whether data does not split it."""
        return self.place.shard_dim is None


def compute_width(config: Config) -> int:
    """Bytes of a number in the compute dtype; `config.precision` is not `auto` any more."""
    return 4 if config.precision == "float32" else 2


def placed(config: Config, model: Model, layout: Layout) -> list[Placed]:
    """Every parameter, in the order in which the model names them. Runs nothing and touches no device.

    Those of layers are [v, S, depth, ...] in a pipeline, as they are held, padding included.
    """
    abstract, names = model.abstract, model.axes
    if pipe := pipeline_of(config, layout):
        abstract, names = pipe.stages.abstract(abstract), pipe.stages.axes(names)
    return lay_out(layout, names, abstract, zero.placements(layout, names, abstract, config.parallel.zero))


def lay_out(layout: Layout, names, abstract, places) -> list[Placed]:
    """Every parameter, from the trees of their logical axes, their shapes and their placements."""
    leaves, axes = jax.tree.leaves_with_path(abstract), jax.tree.leaves(names, is_leaf=zero.is_axes)
    return [
        _placed(layout, name_of(path), leaf.shape, names, place)
        for (path, leaf), names, place in zip(leaves, axes, jax.tree.leaves(places), strict=True)
    ]


def _placed(layout: Layout, name: str, shape: tuple[int, ...], axes, place: zero.Placement) -> Placed:
    layers = math.prod(n for n, axis in zip(shape, axes, strict=True) if axis == LAYERS)
    rest = math.prod(shape) // layout.pieces(place.rest)
    use = math.prod(place.in_use(shape)) // layout.pieces(place.use)
    return Placed(name, shape, axes, place, rest, use, layers)


def listing(parameters: list[Placed], held: list[int]) -> list[str]:
    """A table: how each parameter lies, dim by dim, and the bytes of it that a device holds between steps.

    `held` are those bytes: see `memory.state`. A `-` is a dim without a logical axis, or one that nothing splits.
    """
    rows = [("parameter", "shape", "logical axes", "at rest", "in use", "bytes per device")]
    for p, count in zip(parameters, held, strict=True):
        rest, use = _dims(p.place.rest.partitions), _dims(p.place.use.partitions)
        shape = "x".join(map(str, p.shape))
        rows.append((p.name, shape, _dims(p.axes), rest, "same" if use == rest else use, f"{count:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pad = lambda row: [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
    return ["  ".join([*pad(row), row[-1].rjust(widths[-1])]) for row in rows]


def _dims(names) -> str:
    """What each dim carries: `- embed heads`; a dim that two axes split has both, joined by +."""
    return " ".join("-" if not name else name if isinstance(name, str) else "+".join(name) for name in names)


def notes(config: Config, parameters: list[Placed], layout: Layout) -> list[str]:
    """A sentence for each thing that was asked to be split and is not."""
    found, parallel = [], config.parallel
    if parallel.zero and layout.size(DATA) == 1:
        found.append(f"parallel.zero {parallel.zero} splits nothing here, because {DATA} is 1")
    elif parallel.zero and any(p.whole for p in parameters):
        found.append(_left_whole(config, parameters, layout))
    if parallel.sequence and layout.size(MODEL) == 1:
        found.append(f"parallel.sequence splits nothing here, because {MODEL} is 1")
    pipe = pipeline_of(config, layout)
    return found + (pipelines.notes(config, layout, pipe) if pipe else [])


def _left_whole(config: Config, parameters: list[Placed], layout: Layout) -> str:
    """Names what no dim lets data split; a warning, with sizes that work, where it is much."""
    ranks, whole = layout.size(DATA), [p for p in parameters if p.whole]
    told = left_whole(parameters, whole, ranks)
    if part_of(parameters, whole) <= MUCH:
        return told
    rows = config.train.global_batch_size // micro_batches(config, dict(layout.axes)) // (layout.ranks // ranks)
    fitting = [n for n in divisors(rows) if n > 1 and _left(parameters, layout, n) <= MUCH]
    ways = [_wider(config, ranks), to(DATA, closest(fitting, ranks))]
    return f"warning: {told}" + ("; " + remedy(*ways) if any(ways) else "")


def left_whole(parameters: list[Placed], whole: list[Placed], ranks: int, most: int = 3) -> str:
    """Names at most so many of the parameters in which so many data ranks find no dim to split."""
    names = ", ".join(f"{p.name} ({'x'.join(map(str, p.shape))})" for p in whole[:most])
    more = f" and {len(whole) - most} more" if len(whole) > most else ""
    part = part_of(parameters, whole)
    return (
        f"{DATA}={ranks} finds no dim to split in {names}{more}: {part:.2%} of the parameters are left to every device"
    )


def part_of(parameters: list[Placed], some: list[Placed]) -> float:
    """The part of all elements that some parameters have."""
    return sum(p.elements for p in some) / sum(p.elements for p in parameters)


def ranks_that_split(parameters: list[Placed], asked: list[Placed], layout: Layout) -> list[int]:
    """The numbers of data ranks next to that of `layout` that would not leave much whole of what is asked for."""
    ranks = layout.size(DATA)
    much = MUCH * sum(p.elements for p in parameters)
    fitting = [n for n in range(2, 2 * ranks + 1) if sum(p.elements for p in _unsplit(asked, layout, n)) <= much]
    return closest(fitting, ranks)


def _left(parameters: list[Placed], layout: Layout, ranks: int) -> float:
    """The part of the parameters that so many data ranks would leave whole."""
    return part_of(parameters, _unsplit(parameters, layout, ranks))


def _unsplit(parameters: list[Placed], layout: Layout, ranks: int) -> list[Placed]:
    """The parameters in which so many data ranks would find no dim to split."""

    def free(p: Placed) -> list[int]:
        return [n for n, axis in zip(p.shape, p.axes, strict=True) if axis != LAYERS and not layout.split(axis)]

    return [p for p in parameters if all(n % ranks for n in free(p))]


def _wider(config: Config, ranks: int) -> str:
    """The next widths of a decoder that divide; a classifier of images has those of its family."""
    sizes = config.model
    if sizes.images:
        return ""
    unit = math.lcm(ranks, sizes.heads * (2 if sizes.family == "llama" else 1))  # a head of llama has an even size
    return to("model.embed", multiples(unit, near=sizes.embed))
