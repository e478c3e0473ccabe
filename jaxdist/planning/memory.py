"""What one device holds during a step, predicted from the configuration and the abstract parameters alone.

What lies on a device between steps is exact: a step's arguments, leaf by leaf as `zero` places them. In bytes per
parameter, with AdamW and everything divisible, N devices in `data` (Rajbhandari et al. 2020, figure 1, without its 2 of
gradients, which exist only during a step):

    stage                      0     1         2         3
    float32, bfloat16          12    12/N      12/N      12/N        the f32 parameters are the masters
    mixed                      14    2+12/N    2+12/N    14/N

With `parallel.offload optimizer` 8 of each 12, and 12 of the 14, are in the memory of the host. (Ren et al. 2021,
ZeRO-Offload, who update there too; here the device does, and what it reads and writes goes once each way.)

What a step makes and drops is an estimate: the compiler decides what lives when.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import jax

from jaxdist.config import Config
from jaxdist.mesh import micro_batches
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.planning import pipeline_memory
from jaxdist.planning.activations import saved_per_token, working
from jaxdist.planning.parameter_layout import Placed, compute_width, placed
from jaxdist.planning.pipelines import pipeline_of
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
    host: int = 0
    """In the host's memory, and not on the device, between steps: moments and masters, exactly."""
    host_activations: int = 0
    """In the host's memory from the forward pass to the backward pass: inputs of layers, exactly."""
    host_traffic: int = 0
    """Sent each way between the device and its host in a step."""
    update: int = 0
    """Of what comes from the host's memory, what needs more room than is left by then: an estimate."""

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
            "the update": self.update,
        }


def predict(config: Config, model: Model | Foreign, layout: Layout) -> Memory:
    """For one device of a mesh; `config.precision` is not `auto` any more. Activations of images are not predicted.

    XLA:GPU updates one array after the other, when all but the gradients has gone: what comes from the host's memory
    is there for one parameter at a time, with all its layers.
    """
    parameters = placed(config, model, layout)
    held = _but_for_the_update(config, model, layout, parameters)
    at_once = widths(config).host * max(p.rest for p in parameters)
    gone = held.weights + held.activations + held.working
    gone += max(0, held.gradients - sum(4 * p.rest for p in parameters))
    return replace(held, update=max(0, at_once - gone))


def _but_for_the_update(config: Config, model: Model | Foreign, layout: Layout, parameters: list[Placed]) -> Memory:
    rest, each = sum(p.rest for p in parameters), widths(config)
    train, sizes, k = config.train, config.model, micro_batches(config, dict(layout.axes))
    pipe = pipeline_of(config, layout)
    rows = train.global_batch_size // k // layout.ranks
    counts = 1 if config.optimizer.name == "sgd" else 2
    counters = 4 * (3 + (counts if pipe is None or pipe.flush else 0))  # step, skipped twice; optax's own, if used
    held = dict(
        parameters=each.parameters * rest,
        optimizer=each.optimizer * rest + counters,
        host=each.host * rest,
        copy=sum(_copy(config, p, bool(pipe)) for p in parameters),
        gradients=pipeline_memory.gradients(config, parameters, pipe) if pipe else _gradients(config, parameters),
        weights=pipeline_memory.weights(config, parameters, pipe) if pipe else _weights(config, parameters),
    )
    if isinstance(model, Foreign):
        pixels = sizes.image**2 * sizes.channels
        variables = sum(_bytes(a) for a in jax.tree.leaves(model.variables))
        held |= dict(batch=4 * rows * k * (pixels + 1), variables=variables, host_traffic=held["host"])
        return Memory(**held, activations=0, working=0)
    arrays = 3 if sizes.documents == "apart" else 2  # tokens, labels, starts of documents
    batch = 4 * rows * k * (arrays * sizes.sequence + (sizes.dropout > 0))  # and row numbers
    if pipe:
        in_flight = 0 if pipe.flush else pipeline_memory.in_flight(config, layout, parameters, pipe, rows)
        activations = pipeline_memory.activations(config, layout, pipe, rows)
        return Memory(**held, batch=batch, **activations, in_flight=in_flight, host_traffic=held["host"])
    inside = config.parallel.zero >= 2 and config.parallel.micro_batches == "inside"
    remat = "named" if config.parallel.zero >= 2 and sizes.remat == "none" else sizes.remat
    groups = 1 if inside else k
    """One after the other, each with activations of its own."""
    kept = compute_width(config) * rows * k // groups * sizes.sequence * sizes.layers
    kept *= saved_per_token(sizes, layout, remat)
    to_host = kept if remat == "offload" else 0
    return Memory(
        **held,
        batch=batch,
        activations=kept - to_host,
        working=working(sizes, layout, rows, compute_width(config), remat, _after_the_loss(config, parameters)),
        host_activations=to_host,
        host_traffic=held["host"] + groups * to_host,
    )


class Widths(NamedTuple):
    """Bytes of each element at rest."""

    parameters: int
    optimizer: int
    host: int
    """What `parallel.offload` moves there, of either."""


def widths(config: Config) -> Widths:
    """f32, and of `mixed` the masters."""
    moments = 4 * MOMENTS[config.optimizer.name]
    if config.parallel.offload == "none":
        return Widths(4, moments, 0)
    return Widths(0, 0, 4 + moments) if config.precision == "mixed" else Widths(4, 0, moments)


def _bytes(a: jax.ShapeDtypeStruct) -> int:
    """A key of JAX's usual generator is two words of 32 bits."""
    return 8 if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key) else a.size * a.dtype.itemsize


def state(config: Config, p: Placed, pipelined: bool = False) -> int:
    """Bytes of one parameter and all that belongs to it, which a device holds between steps."""
    each = widths(config)
    return p.rest * (each.parameters + each.optimizer) + _copy(config, p, pipelined)


def _copy(config: Config, p: Placed, pipelined: bool) -> int:
    if config.precision != "mixed":
        return 0
    at_rest = config.parallel.zero == 3 or pipelined  # whose region gathers them
    return compute_width(config) * (p.rest if at_rest else p.use)


def _gradients(config: Config, parameters: list[Placed]) -> int:
    """Stages 0 and 1 add up whole gradients, and hold a micro-batch's own beside them; 2 and 3 shards, and one layer
    whole beside the largest table, which the loss adds up in f32.

    In stage 1 the sum is reduced to a shard at the end. With one micro-batch there is nothing to add to: XLA takes the
    loop of one turn apart, and f32 comes when activations and weights have gone.
    """
    rest, use = (sum(getattr(p, name) for p in parameters) for name in ("rest", "use"))
    stage, width, alone = config.parallel.zero, compute_width(config), config.train.accumulation == 1
    if stage >= 2:
        layer, table = _at_once(parameters)
        return (1 if alone else 2) * 4 * rest + (4 + width) * layer + 4 * table
    if alone:
        return width * use
    return (4 + width) * use + (4 * rest if stage else 0)


def _after_the_loss(config: Config, parameters: list[Placed]) -> int:
    """Of `_gradients`, what only the backward pass of the layers makes."""
    width, (layer, table) = compute_width(config), _at_once(parameters)
    if config.parallel.zero >= 2:
        return 4 * sum(p.rest for p in parameters) + (4 + width) * layer
    return max(0, width * sum(p.use for p in parameters) - 4 * table)


def _weights(config: Config, parameters: list[Placed]) -> int:
    """Stage 0 casts, 1 and 2 gather all, 3 one layer and the largest table; `mixed` keeps what stages 0 to 2 use."""
    rest, use = (sum(getattr(p, name) for p in parameters) for name in ("rest", "use"))
    stage, width = config.parallel.zero, compute_width(config)
    cast = width * rest if config.precision == "bfloat16" else 0
    if use == rest:
        return cast
    if stage == 3:
        return cast + width * sum(_at_once(parameters))
    return 0 if config.precision == "mixed" else width * use


def _at_once(parameters: list[Placed]) -> tuple[int, int]:
    """Elements in use of one layer, and of the largest parameter that is of none: tables are used one after the other.

    A model without layers has all of its parameters in use at once.
    """
    layer = [p.at_once for p in parameters if p.stacked]
    tables = [p.use for p in parameters if not p.stacked]
    return (sum(layer), max(tables)) if layer else (sum(tables), 0)
