"""What one device holds during a step, predicted from the configuration and the abstract parameters alone.

What lies on a device between steps is exact: a step's arguments, leaf by leaf as `zero` places them. In bytes per
parameter, with AdamW and everything divisible, N devices in `data` (Rajbhandari et al. 2020, figure 1, without its 2 of
gradients, which exist only during a step):

    stage                      0     1         2         3
    float32, bfloat16          12    12/N      12/N      12/N        the f32 parameters are the masters
    mixed                      14    2+12/N    2+12/N    14/N

What a step makes and drops is an estimate: the compiler decides what lives when.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax

from jaxdist.config import Config
from jaxdist.mesh import micro_batches
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.planning import pipeline_memory
from jaxdist.planning.activations import saved_per_token, working
from jaxdist.planning.pipelines import pipeline_of
from jaxdist.planning.placement import Placed, compute_width, placed
from jaxdist.sharding import Layout

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}
"""Parameter-sized arrays that each update rule keeps."""


@dataclass(frozen=True)
class Memory:
    """Bytes per device."""

    parameters: int
    optimizer: int
    copy: int
    """The parameters in the compute dtype, where they are kept between steps: `mixed`."""
    batch: int
    gradients: int
    """Accumulators in f32, and the micro-batch's own gradients beside them: an estimate."""
    weights: int
    """What is cast or gathered at the start of a step, or layer by layer: an estimate."""
    activations: int
    """What the forward pass leaves for the backward pass: an estimate."""
    working: int
    """What exists only for a moment in either: an estimate."""
    variables: int = 0
    """Batch statistics, and keys and counts of random numbers."""
    in_flight: int = 0
    """What an asynchronous pipeline holds between steps: versions of the weights and batches, exactly, and activations,
    which are an estimate."""

    @property
    def arguments(self) -> int:
        """What lies on the device between steps, exactly; but for `in_flight`."""
        return sum(self.persistent.values())

    @property
    def total(self) -> int:
        return self.arguments + sum(self.transient.values())

    @property
    def persistent(self) -> dict[str, int]:
        """What lies on the device between steps, by what people call it."""
        return {
            "parameters": self.parameters,
            "optimizer": self.optimizer,
            "their bfloat16 copy": self.copy,
            "batch": self.batch,
            "batch statistics": self.variables,
            "in flight": self.in_flight,
        }

    @property
    def transient(self) -> dict[str, int]:
        """What a step makes and drops: estimates."""
        return {
            "gradients": self.gradients,
            "weights in use": self.weights,
            "activations": self.activations + self.working,
        }


def predict(config: Config, model: Model | Foreign, layout: Layout) -> Memory:
    """For one device of a mesh; `config.precision` is not `auto` any more. Activations of images are not predicted."""
    parameters = placed(config, model, layout)
    rest, moments = sum(p.rest for p in parameters), MOMENTS[config.optimizer.name]
    train, sizes, k = config.train, config.model, micro_batches(config, dict(layout.axes))
    pipe = pipeline_of(config, layout)
    rows = train.global_batch_size // k // layout.ranks
    counts = 1 if config.optimizer.name == "sgd" else 2
    counters = 4 * (3 + (counts if pipe is None or pipe.flush else 0))  # step, skipped twice; optax's own, if used
    held = dict(
        parameters=4 * rest,
        optimizer=4 * rest * moments + counters,
        copy=sum(_copy(config, p, bool(pipe)) for p in parameters),
        gradients=pipeline_memory.gradients(config, parameters, pipe) if pipe else _gradients(config, parameters),
        weights=pipeline_memory.weights(config, parameters, pipe) if pipe else _weights(config, parameters),
    )
    if isinstance(model, Foreign):
        pixels = sizes.image**2 * sizes.channels
        variables = sum(_bytes(a) for a in jax.tree.leaves(model.variables))
        return Memory(**held, batch=4 * rows * k * (pixels + 1), activations=0, working=0, variables=variables)
    batch = 4 * rows * k * (2 * sizes.sequence + (sizes.dropout > 0))  # tokens, labels, row numbers
    if pipe:
        in_flight = 0 if pipe.flush else pipeline_memory.in_flight(config, layout, parameters, pipe, rows)
        activations = pipeline_memory.activations(config, layout, pipe, rows)
        return Memory(**held, batch=batch, **activations, in_flight=in_flight)
    inside = config.parallel.zero >= 2 and config.parallel.micro_batches == "inside"
    remat = "named" if config.parallel.zero >= 2 and sizes.remat == "none" else sizes.remat
    kept = rows * (k if inside else 1) * sizes.sequence * sizes.layers * saved_per_token(sizes, layout, remat)
    return Memory(
        **held,
        batch=batch,
        activations=compute_width(config) * kept,
        working=working(sizes, layout, rows, compute_width(config)),
    )


def _bytes(a: jax.ShapeDtypeStruct) -> int:
    """A key of JAX's usual generator is two words of 32 bits."""
    return 8 if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a.size * a.dtype.itemsize


def size(count: float) -> str:
    """Bytes for a person: `1.4 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB" if count < 1024 else f"{count / 1024:.1f} TiB"


def state(config: Config, p: Placed, pipelined: bool = False) -> int:
    """Bytes of one parameter and all that belongs to it, which a device holds between steps."""
    return 4 * p.rest * (1 + MOMENTS[config.optimizer.name]) + _copy(config, p, pipelined)


def _copy(config: Config, p: Placed, pipelined: bool) -> int:
    if config.precision != "mixed":
        return 0
    at_rest = config.parallel.zero == 3 or pipelined  # whose region gathers them
    return compute_width(config) * (p.rest if at_rest else p.use)


def _gradients(config: Config, parameters: list[Placed]) -> int:
    """Stages 0 and 1 add up whole gradients, and hold a micro-batch's own beside them; 2 and 3 shards, one layer whole.

    In stage 1 the sum is reduced to a shard at the end. With one micro-batch there is nothing to add to: XLA takes the
    loop of one turn apart, and f32 comes when activations and weights have gone.
    """
    rest, use, at_once = (sum(getattr(p, name) for p in parameters) for name in ("rest", "use", "at_once"))
    stage, width, alone = config.parallel.zero, compute_width(config), config.train.accumulation == 1
    if stage >= 2:
        return (1 if alone else 2) * 4 * rest + (4 + width) * at_once
    if alone:
        return width * use
    return (4 + width) * use + (4 * rest if stage else 0)


def _weights(config: Config, parameters: list[Placed]) -> int:
    """Stage 0 casts, 1 and 2 gather all, 3 one layer and what is no layer; `mixed` keeps what stages 0 to 2 use."""
    rest, use, at_once = (sum(getattr(p, name) for p in parameters) for name in ("rest", "use", "at_once"))
    stage, width = config.parallel.zero, compute_width(config)
    cast = width * rest if config.precision == "bfloat16" else 0
    if use == rest:
        return cast
    if stage == 3:
        return cast + width * at_once
    return 0 if config.precision == "mixed" else width * use
