"""Say which splits of the parameters were requested and do not take place, and what would make them."""

from __future__ import annotations

import math

from jaxdist.config import Config
from jaxdist.mesh import DATA, REPLICA, ZERO_AXES
from jaxdist.mesh.crossing import asked
from jaxdist.mesh.split import own_rows, why_whole_on_replicas
from jaxdist.output.units import closest, divisors, multiples, remedy, to
from jaxdist.parallel.vocabulary import Vocabulary
from jaxdist.planning import pipelines
from jaxdist.planning.parameter_layout import Placed
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.sharding import LAYERS, Layout

MUCH = 0.1
"""More than this part of the parameters, left whole by ZeRO, is worth a warning."""


def notes(sharded: ShardedModel) -> list[str]:
    """Return a sentence for each split that was requested and does not take place."""
    config = sharded.config
    layout = sharded.layout
    parameters = sharded.parameters
    found = []
    parallel = config.parallel
    over_replicas = any(p.place.replica_dim is not None for p in parameters)
    if parallel.zero and layout.size(*ZERO_AXES) == 1 and not over_replicas:
        found.append(f"parallel.zero {parallel.zero} splits nothing here, because {DATA} is 1")
    elif parallel.zero and unsplit(parameters):
        found.append(_unsplit_by_zero(sharded))
    if parallel.replica_zero and layout.size(REPLICA) > 1 and not over_replicas:
        found.append(_each_replica_holds_all(sharded))
    found += asked(config).notes(layout.size(REPLICA))
    vocabulary = Vocabulary(layout, config.model.vocab)
    if vocabulary.added and not config.model.images:
        found.append(_added_rows(vocabulary))
    pipe = sharded.pipe
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


def _each_replica_holds_all(sharded: ShardedModel) -> str:
    """Return why `replica` splits neither masters nor optimizer state, in a sentence."""
    why = why_whole_on_replicas(sharded.split)
    if not why and sharded.config.model.all_rows_at_once:
        why = "with dropout, the compiler chooses where the gradients of a classifier are reduced"
    elif not why:
        why = f"no parameter has a dim that {REPLICA}={sharded.layout.size(REPLICA)} divides"
    return f"each replica holds all masters and moments (parallel.replica_zero splits nothing here): {why}"


def _unsplit_by_zero(sharded: ShardedModel) -> str:
    """Name the parameters that their ZeRO group leaves whole; where that is much, warn and offer sizes that work."""
    config = sharded.config
    layout = sharded.layout
    parameters = sharded.parameters
    ranks = layout.size(DATA)
    whole = unsplit(parameters)
    message = described(whole, parameters, layout)
    if share(whole, parameters) <= MUCH:
        return message
    # The rows of a micro-batch must divide among the data ranks.
    rows = own_rows(config.train.global_batch_size, sharded.split.micro_batches, layout.ranks // ranks)
    fitting = [n for n in divisors(rows) if n > 1 and share(unsplit_by(n, parameters, layout), parameters) <= MUCH]
    options = [_wider(config, layout.size(*ZERO_AXES)), to(DATA, closest(fitting, ranks))]
    if any(options):
        message += "; " + remedy(*options)
    return f"warning: {message}"


def unsplit(parameters: list[Placed]) -> list[Placed]:
    """Return the parameters that ZeRO leaves whole although they have a group to split them."""
    return [p for p in parameters if p.whole and p.place.group and not p.place.role.steered]


def unsplit_by(ranks: int, parameters: list[Placed], layout: Layout) -> list[Placed]:
    """Return the parameters in which a number of data ranks would find no dim to split."""

    def free(p: Placed) -> list[int]:
        # ZeRO splits a dim that no other axis splits, and never the dim of the layers.
        return [n for n, axis in zip(p.shape, p.axes, strict=True) if axis != LAYERS and not layout.split(axis)]

    def group(p: Placed) -> int:
        return ranks * layout.size(*(axis for axis in p.place.group if axis != DATA))

    return [p for p in parameters if not p.place.role.steered and all(n % group(p) for n in free(p))]


def share(some: list[Placed], parameters: list[Placed]) -> float:
    """Return the part of the elements of all parameters that some of them have."""
    return sum(p.elements for p in some) / sum(p.elements for p in parameters)


def described(whole: list[Placed], parameters: list[Placed], layout: Layout, most: int = 3) -> str:
    """Name at most `most` of the parameters in which their ZeRO groups find no dim to split, in a sentence."""
    groups = {axis for p in whole for axis in p.place.group}
    ranks = " x ".join(f"{axis}={layout.size(axis)}" for axis in ZERO_AXES if axis in groups)
    names = ", ".join(f"{p.name} ({'x'.join(map(str, p.shape))})" for p in whole[:most])
    more = f" and {len(whole) - most} more" if len(whole) > most else ""
    part = share(whole, parameters)
    return f"{ranks} finds no dim to split in {names}{more}: {part:.2%} of the parameters are left to every device"


def ranks_that_split(requested: list[Placed], parameters: list[Placed], layout: Layout) -> list[int]:
    """Return the numbers of data ranks, nearest to that of `layout`, that leave little of `requested` whole."""
    ranks = layout.size(DATA)
    fitting = [n for n in range(2, 2 * ranks + 1) if share(unsplit_by(n, requested, layout), parameters) <= MUCH]
    return closest(fitting, ranks)


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
