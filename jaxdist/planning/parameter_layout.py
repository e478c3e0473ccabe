"""Predict how every parameter is laid out over the mesh: which elements a device holds, and what could not be split."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import jax

from jaxdist.config import Config
from jaxdist.mesh import CONTEXT, DATA, MODEL, REPLICA, ZERO_AXES
from jaxdist.mesh.crossing import asked
from jaxdist.mesh.split import Split, why_whole_on_replicas
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.output.units import closest, divisors, multiples, remedy, to
from jaxdist.parallel import placing, zero
from jaxdist.parallel.pipeline.stages import BLOCKS
from jaxdist.parallel.vocabulary import Vocabulary
from jaxdist.parallel.zero import Placements
from jaxdist.planning import adapters, pipelines
from jaxdist.planning.pipelines import pipeline_of
from jaxdist.planning.predicted_collectives import F32
from jaxdist.sharding import COUNTED, LAYERS, Layout, Params, name_of

MUCH = 0.1
"""More than this part of the parameters, left whole by ZeRO, is worth a warning."""


@dataclass(frozen=True)
class Placed:
    """One parameter on a mesh."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    place: zero.Placement
    held: int
    """Elements that a device holds between steps."""
    rest: int
    """Elements at rest in each replica: those that are held, gathered over the replicas."""
    use: int
    """Elements that a device holds in use, of all its layers."""
    shard: tuple[int, ...]
    """The shape of what a device has of its gradient when it crosses the replicas."""
    layers: int = 1
    """Layers that a device holds, padding included; 1 for a parameter that belongs to no layer."""
    forward_only: bool = False
    """Whether no gradient needs its value, so that the backward pass does not gather it again."""
    exact: bool = False
    """Whether it is in f32 in any compute dtype."""
    stored: int = F32
    """Bytes of each of its numbers between steps."""

    @property
    def elements(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def at_once(self) -> int:
        """Elements in use where the layers are used one after the other."""
        return self.use // self.layers

    @property
    def stacked(self) -> bool:
        """Whether the first dim counts the layers."""
        return self.name.partition(".")[0] == BLOCKS

    @property
    def counted(self) -> bool:
        """Whether its gradient is a count: every device holds it whole, and it has no moments."""
        return COUNTED in self.axes

    @property
    def trained(self) -> bool:
        """Whether it has a gradient and optimizer state."""
        return self.place.trained

    @property
    def whole(self) -> bool:
        """Whether ZeRO does not split it."""
        return self.place.shard_dim is None

    def width(self, config: Config) -> int:
        """Return the bytes of each of its numbers in use."""
        return F32 if self.exact else compute_width(config)


def compute_width(config: Config) -> int:
    """Return the bytes of a number in the compute dtype; `config.precision` is resolved, no longer `auto`."""
    return 4 if config.precision == "float32" else 2


def by_precision(config: Config, parameters: list[Placed]) -> dict[str, list[Placed]]:
    """Return the parameters in groups, by the precision that would keep and cast all of them as a group is.

    Frozen ones have no copy that is kept. They lie in the compute dtype, as in precision float32, or are cast in each
    step, as in precision bfloat16.
    """
    groups: dict[str, list[Placed]] = {}
    for p in parameters:
        precision: str = config.precision
        if not p.trained:
            precision = "float32" if p.stored == compute_width(config) else "bfloat16"
        groups.setdefault(precision, []).append(p)
    return groups


def placed(config: Config, model: Model | Foreign, layout: Layout) -> list[Placed]:
    """Return every parameter, in the order in which the model names them. Runs nothing and touches no device.

    In a pipeline, the parameters of layers are [v, S, depth, ...], as ranks hold them, padding included. Tables have
    the rows that the mesh adds to the vocabulary.
    """
    abstract = model.abstract
    if not isinstance(model, Foreign):
        abstract = Vocabulary(layout, model.vocab).abstract(abstract)
    axes = model.axes
    pipe = pipeline_of(config, layout)
    if pipe:
        abstract = pipe.stages.abstract(abstract)
        axes = pipe.stages.axes(axes)
    places = placing.placements(
        layout,
        axes,
        abstract,
        placing.ZeroOptions.of(Split(config, dict(layout.axes))),
    )
    if isinstance(model, Foreign):
        return lay_out(layout, axes, abstract, places)
    forward_only = model.forward_only | adapters.forward_only(config)
    return lay_out(layout, axes, abstract, places, forward_only, model.exact)


def lay_out(
    layout: Layout,
    axes: Params,
    abstract: Params,
    places: Placements,
    forward_only: Collection[str] = (),
    exact: Collection[str] = (),
) -> list[Placed]:
    """Return every parameter, from the trees of their logical axes, their shapes and their placements.

    `forward_only` and `exact` are the names of those that are.
    """
    leaves = jax.tree.leaves_with_path(abstract)
    axes_of = jax.tree.leaves(axes, is_leaf=placing.is_axes)
    found = []
    for (path, leaf), names, place in zip(leaves, axes_of, jax.tree.leaves(places), strict=True):
        found.append(
            Placed(
                name=name_of(path),
                shape=leaf.shape,
                axes=names,
                place=place,
                held=math.prod(leaf.shape) // layout.pieces(place.held),
                rest=math.prod(leaf.shape) // layout.pieces(place.rest),
                use=math.prod(place.in_use(leaf.shape)) // layout.pieces(place.use),
                shard=layout.shard_shape(leaf.shape, place.reduced),
                layers=math.prod(n for n, axis in zip(leaf.shape, names, strict=True) if axis == LAYERS),
                forward_only=name_of(path) in forward_only,
                exact=name_of(path) in exact,
                stored=leaf.dtype.itemsize,
            )
        )
    return found


def listing(parameters: list[Placed], held: list[int]) -> list[str]:
    """Return a table of how each parameter lies, dim by dim, and of the bytes that a device holds between steps.

    `held` has these bytes for each parameter (`memory.state`). A `-` is a dim without a logical axis, or one that
    nothing splits. Where some parameters are frozen, it says which are trained.
    """
    some_are_frozen = not all(p.trained for p in parameters)
    names = ["parameter", "shape", "logical axes", "at rest", "in use"]
    if some_are_frozen:
        names.append("trained")
    rows = [(*names, "bytes per device")]
    for p, count in zip(parameters, held, strict=True):
        rest = _dims(p.place.held.partitions)
        use = _dims(p.place.use.partitions)
        if use == rest:
            use = "same"
        shape = "x".join(map(str, p.shape))
        cells = [p.name, shape, _dims(p.axes), rest, use]
        if some_are_frozen:
            cells.append("yes" if p.trained else "frozen")
        rows.append((*cells, f"{count:,}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for *cells, last in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths[:-1], strict=True)]
        lines.append("  ".join([*padded, last.rjust(widths[-1])]))
    return lines


def _dims(names: Iterable[str | tuple[str, ...] | None]) -> str:
    """Return the axis of each dim, as `- embed heads`; a dim that two axes split has both, joined by +."""
    words = []
    for name in names:
        if not name:
            words.append("-")
        elif isinstance(name, str):
            words.append(name)
        else:
            words.append("+".join(name))
    return " ".join(words)


def notes(config: Config, parameters: list[Placed], layout: Layout) -> list[str]:
    """Return a sentence for each split that was requested and does not take place."""
    found = []
    parallel = config.parallel
    over_replicas = any(p.place.replica_dim is not None for p in parameters)
    if parallel.zero and layout.size(*ZERO_AXES) == 1 and not over_replicas:
        found.append(f"parallel.zero {parallel.zero} splits nothing here, because {DATA} is 1")
    elif parallel.zero and unsplit(parameters):
        found.append(_left_whole(config, parameters, layout))
    if parallel.replica_zero and layout.size(REPLICA) > 1 and not over_replicas:
        found.append(_each_replica_holds_all(config, layout))
    if parallel.sequence and layout.size(MODEL) == 1:
        found.append(f"parallel.sequence splits nothing here, because {MODEL} is 1")
    if parallel.context != "auto" and layout.size(CONTEXT) == 1:
        found.append(f"parallel.context {parallel.context} splits nothing here, because {CONTEXT} is 1")
    found += asked(config).notes(layout.size(REPLICA))
    vocabulary = Vocabulary(layout, config.model.vocab)
    if vocabulary.added and not config.model.images:
        found.append(_added_rows(vocabulary))
    pipe = pipeline_of(config, layout)
    if pipe and pipe.stages.padded:
        found.append(pipelines.uneven(config, pipe))
    return found


def _added_rows(vocabulary: Vocabulary) -> str:
    """Return what the mesh adds to the vocabulary, in a sentence."""
    parts = vocabulary.layout.parts("vocab")
    return (
        f"vocabulary {vocabulary.size} padded to {vocabulary.rows} in memory, to divide by {parts}; the added rows are "
        f"in no loss and no checkpoint"
    )


def _each_replica_holds_all(config: Config, layout: Layout) -> str:
    """Return why `replica` splits neither masters nor optimizer state, in a sentence."""
    why = why_whole_on_replicas(Split(config, dict(layout.axes)))
    if not why and config.model.all_rows_at_once:
        why = "with dropout, the compiler chooses where the gradients of a classifier are reduced"
    elif not why:
        why = f"no parameter has a dim that {REPLICA}={layout.size(REPLICA)} divides"
    return f"each replica holds all masters and moments (parallel.replica_zero splits nothing here): {why}"


def _left_whole(config: Config, parameters: list[Placed], layout: Layout) -> str:
    """Name the parameters that their ZeRO group leaves whole; where that is much, warn and offer sizes that work."""
    ranks = layout.size(DATA)
    whole = unsplit(parameters)
    message = left_whole(parameters, whole, layout)
    if part_of(parameters, whole) <= MUCH:
        return message
    # The rows of a micro-batch must divide among the data ranks.
    rows = config.train.global_batch_size // Split(config, dict(layout.axes)).micro_batches // (layout.ranks // ranks)
    fitting = [n for n in divisors(rows) if n > 1 and _left(parameters, layout, n) <= MUCH]
    options = [_wider(config, layout.size(*ZERO_AXES)), to(DATA, closest(fitting, ranks))]
    if any(options):
        message += "; " + remedy(*options)
    return f"warning: {message}"


def unsplit(parameters: list[Placed]) -> list[Placed]:
    """Return the parameters that ZeRO leaves whole although they have a group to split them."""
    return [p for p in parameters if p.whole and p.place.over and not p.counted]


def left_whole(parameters: list[Placed], whole: list[Placed], layout: Layout, most: int = 3) -> str:
    """Name at most `most` of the parameters in which their ZeRO groups find no dim to split, in a sentence."""
    groups = {axis for p in whole for axis in p.place.over}
    ranks = " x ".join(f"{axis}={layout.size(axis)}" for axis in ZERO_AXES if axis in groups)
    names = ", ".join(f"{p.name} ({'x'.join(map(str, p.shape))})" for p in whole[:most])
    more = f" and {len(whole) - most} more" if len(whole) > most else ""
    part = part_of(parameters, whole)
    return f"{ranks} finds no dim to split in {names}{more}: {part:.2%} of the parameters are left to every device"


def part_of(parameters: list[Placed], some: list[Placed]) -> float:
    """Return the part of all elements that some of the parameters have."""
    return sum(p.elements for p in some) / sum(p.elements for p in parameters)


def ranks_that_split(parameters: list[Placed], requested: list[Placed], layout: Layout) -> list[int]:
    """Return the numbers of data ranks, nearest to that of `layout`, that leave little of `requested` whole."""
    ranks = layout.size(DATA)
    much = MUCH * sum(p.elements for p in parameters)
    fitting = [n for n in range(2, 2 * ranks + 1) if sum(p.elements for p in _unsplit(requested, layout, n)) <= much]
    return closest(fitting, ranks)


def _left(parameters: list[Placed], layout: Layout, ranks: int) -> float:
    """Return the part of the parameters that so many data ranks would leave whole."""
    return part_of(parameters, _unsplit(parameters, layout, ranks))


def _unsplit(parameters: list[Placed], layout: Layout, ranks: int) -> list[Placed]:
    """Return the parameters in which so many data ranks would find no dim to split."""

    def free(p: Placed) -> list[int]:
        # ZeRO splits a dim that no other axis splits, and never the dim of the layers.
        return [n for n, axis in zip(p.shape, p.axes, strict=True) if axis != LAYERS and not layout.split(axis)]

    def group(p: Placed) -> int:
        return ranks * layout.size(*(axis for axis in p.place.over if axis != DATA))

    return [p for p in parameters if not p.counted and all(n % group(p) for n in free(p))]


def _wider(config: Config, ranks: int) -> str:
    """Offer the next widths of a decoder that `ranks` divide; an image classifier has the widths of its family."""
    sizes = config.model
    if sizes.images:
        return ""
    unit = ranks
    if not sizes.head_dim:
        # The width is that of all heads. Rotary positions pair the values of a head, so its size is even.
        head = 2 if sizes.traits.rotary else 1
        unit = math.lcm(ranks, sizes.heads * head)
    return to("model.embed", multiples(unit, near=sizes.embed))
