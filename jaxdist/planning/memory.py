"""Predict what one device holds during a step, from the configuration and the abstract parameters alone.

The state between steps is exact: it is the arguments of a step, leaf by leaf as `zero` places them. In bytes per
parameter, with AdamW, where everything divides by the N devices of the data axis (Rajbhandari et al. 2020, figure 1,
without its 2 bytes of gradients, which exist only during a step):

    stage                      0     1         2         3
    float32, bfloat16          12    12/N      12/N      12/N        the f32 parameters are the masters
    mixed                      14    2+12/N    2+12/N    14/N

With `parallel.offload optimizer`, 8 of each 12 and 12 of each 14 are in host memory. (ZeRO-Offload, Ren et al. 2021,
also updates there; here the device updates, and the state crosses the link once each way.)

Arrays that exist only during a step are estimates: the compiler decides how long each of them lives.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict

import jax

from jaxdist.config import Config
from jaxdist.mesh import micro_batches
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.planning import pipeline_memory
from jaxdist.planning.activations import saved_per_token, working
from jaxdist.planning.parameter_layout import Placed, compute_width, placed
from jaxdist.planning.pipelines import Pipeline, pipeline_of
from jaxdist.planning.predicted_collectives import F32
from jaxdist.sharding import Layout

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}
"""Parameter-sized arrays that each update rule keeps."""


@dataclass(frozen=True)
class Memory:
    """Bytes per device."""

    parameters: int
    optimizer: int
    copy: int
    """The parameters in the compute dtype, where they are kept between steps (precision mixed)."""
    batch: int
    gradients: int
    """Sums in f32, and the gradients of one micro-batch beside them: an estimate."""
    weights: int
    """Weights that are cast or gathered, at the start of a step or layer by layer: an estimate."""
    activations: int
    """Activations that the forward pass leaves for the backward pass: an estimate."""
    working: int
    """Arrays that exist only for a moment in either pass: an estimate."""
    variables: int = 0
    """Batch statistics, and keys and counts of random numbers."""
    in_flight: int = 0
    """Buffers that an asynchronous pipeline holds between steps: versions of the weights and batches, which are exact,
    and activations, which are an estimate."""
    host: int = 0
    """Moments and masters that are in host memory between steps, and not on the device: exact."""
    host_activations: int = 0
    """Inputs of layers that are in host memory from the forward pass to the backward pass: exact."""
    host_traffic: int = 0
    """Bytes that cross the link between the device and its host in a step, each way."""
    update: int = 0
    """Room that the offloaded optimizer state needs in the update beyond what is free by then: an estimate."""

    @property
    def arguments(self) -> int:
        """The bytes that lie on the device between steps: exact, except for `in_flight`."""
        return sum(self.persistent.values())

    @property
    def total(self) -> int:
        """The most bytes that the device holds during a step."""
        return self.arguments + sum(self.transient.values())

    @property
    def persistent(self) -> dict[str, int]:
        """The bytes that lie on the device between steps, by the usual names."""
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
        """The bytes that exist only during a step, by the usual names: estimates."""
        return {
            "gradients": self.gradients,
            "weights in use": self.weights,
            "activations": self.activations + self.working,
            "the update": self.update,
        }


def predict(config: Config, model: Model | Foreign, layout: Layout) -> Memory:
    """Predict the memory of one device of a mesh; `config.precision` is resolved, no longer `auto`.

    The activations of image classifiers are not predicted.
    """
    parameters = placed(config, model, layout)
    pipe = pipeline_of(config, layout)
    if isinstance(model, Foreign):
        held = _classifier(config, model, layout, parameters)
    elif pipe is not None:
        held = _pipeline(config, layout, parameters, pipe)
    else:
        held = _decoder(config, layout, parameters)
    return replace(held, update=_update(config, parameters, held))


def _classifier(config: Config, model: Foreign, layout: Layout, parameters: list[Placed]) -> Memory:
    """Return the memory of an image classifier, without the update of offloaded state."""
    at_rest = _at_rest(config, parameters)
    sizes = config.model
    k = micro_batches(config, dict(layout.axes))
    pixels = sizes.image**2 * sizes.channels
    return Memory(
        **at_rest,
        batch=F32 * _rows(config, layout) * k * (pixels + 1),
        variables=sum(_bytes(a) for a in jax.tree.leaves(model.variables)),
        gradients=_gradients(config, parameters),
        weights=_weights(config, parameters),
        activations=0,
        working=0,
        host_traffic=at_rest["host"],
    )


def _pipeline(config: Config, layout: Layout, parameters: list[Placed], pipe: Pipeline) -> Memory:
    """Return the memory of a rank of a pipeline, without the update of offloaded state."""
    at_rest = _at_rest(config, parameters, pipe)
    rows = _rows(config, layout)
    in_flight = 0
    if not pipe.flush:
        in_flight = pipeline_memory.in_flight(config, layout, parameters, pipe, rows)
    return Memory(
        **at_rest,
        batch=_batch_of_tokens(config, layout),
        gradients=pipeline_memory.gradients(config, parameters, pipe),
        weights=pipeline_memory.weights(config, parameters, pipe),
        **pipeline_memory.activations(config, layout, pipe, rows),
        in_flight=in_flight,
        host_traffic=at_rest["host"],
    )


def _decoder(config: Config, layout: Layout, parameters: list[Placed]) -> Memory:
    """Return the memory of a decoder without a pipeline, without the update of offloaded state."""
    at_rest = _at_rest(config, parameters)
    parallel = config.parallel
    sizes = config.model
    width = compute_width(config)
    rows = _rows(config, layout)
    k = micro_batches(config, dict(layout.axes))
    # ZeRO 2 and 3 keep only the named arrays of a layer where nothing is checkpointed.
    remat = sizes.remat
    if parallel.zero >= 2 and remat == "none":
        remat = "named"
    # Groups of micro-batches run one after the other, each with activations of its own.
    groups = k
    if parallel.zero >= 2 and parallel.micro_batches == "inside":
        groups = 1
    kept = width * rows * k // groups * sizes.sequence * sizes.layers
    kept *= saved_per_token(sizes, layout, remat)
    to_host = 0
    if remat == "offload":
        to_host = kept
    return Memory(
        **at_rest,
        batch=_batch_of_tokens(config, layout),
        gradients=_gradients(config, parameters),
        weights=_weights(config, parameters),
        activations=kept - to_host,
        working=working(sizes, layout, rows, width, remat, later=_gradients_of_layers(config, parameters)),
        host_activations=to_host,
        host_traffic=at_rest["host"] + groups * to_host,
    )


class _AtRest(TypedDict):
    """The fields of `Memory` that are the same for every kind of model."""

    parameters: int
    optimizer: int
    host: int
    copy: int


def _at_rest(config: Config, parameters: list[Placed], pipe: Pipeline | None = None) -> _AtRest:
    """Return what parameters and optimizer state take between steps."""
    rest = sum(p.rest for p in parameters)
    each = widths(config)
    # The step, the skipped steps, and those skipped in a row; then the optimizer's own counts, which PipeDream's step
    # does not use.
    counters = 3
    if pipe is None or pipe.flush:
        counters += 1 if config.optimizer.name == "sgd" else 2
    return {
        "parameters": each.parameters * rest,
        "optimizer": each.optimizer * rest + 4 * counters,
        "host": each.host * rest,
        "copy": sum(_copy(config, p, pipelined=pipe is not None) for p in parameters),
    }


def _rows(config: Config, layout: Layout) -> int:
    """Return the rows of a micro-batch on one device."""
    k = micro_batches(config, dict(layout.axes))
    return config.train.global_batch_size // k // layout.ranks


def _batch_of_tokens(config: Config, layout: Layout) -> int:
    """Return the bytes of the token batch of a step on one device."""
    sizes = config.model
    k = micro_batches(config, dict(layout.axes))
    # Tokens, labels and, where documents are kept apart, the starts of documents; dropout needs the row's number.
    arrays = 3 if sizes.documents == "apart" else 2
    numbers = int(sizes.dropout > 0)
    return 4 * _rows(config, layout) * k * (arrays * sizes.sequence + numbers)


def _update(config: Config, parameters: list[Placed], held: Memory) -> int:
    """Return the room that offloaded optimizer state needs in the update, beyond what is free by then."""
    # XLA:GPU updates one array after the other, when everything but the gradients is gone. Offloaded state is therefore
    # on the device for one parameter at a time, with all its layers.
    needed = widths(config).host * max(p.rest for p in parameters)
    free = held.weights + held.activations + held.working
    free += max(0, held.gradients - sum(F32 * p.rest for p in parameters))
    return max(0, needed - free)


class Widths(NamedTuple):
    """Bytes of each parameter at rest."""

    parameters: int
    optimizer: int
    host: int
    """Bytes of either that `parallel.offload` moves to host memory."""


def widths(config: Config) -> Widths:
    """Return the bytes of each parameter at rest, in f32; with precision mixed, of its master."""
    moments = 4 * MOMENTS[config.optimizer.name]
    if config.parallel.offload == "none":
        return Widths(parameters=4, optimizer=moments, host=0)
    if config.precision == "mixed":
        # The device keeps the copy in the compute dtype.
        return Widths(parameters=0, optimizer=0, host=4 + moments)
    return Widths(parameters=4, optimizer=0, host=moments)


def _bytes(a: jax.ShapeDtypeStruct) -> int:
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
        # A key of JAX's default generator is two words of 32 bits.
        return 8
    return a.size * a.dtype.itemsize


def state(config: Config, p: Placed, pipelined: bool = False) -> int:
    """Return the bytes that a device holds between steps of one parameter and all that belongs to it."""
    each = widths(config)
    return p.rest * (each.parameters + each.optimizer) + _copy(config, p, pipelined)


def _copy(config: Config, p: Placed, pipelined: bool) -> int:
    """Return the bytes of a parameter's copy in the compute dtype."""
    if config.precision != "mixed":
        return 0
    # A pipeline gathers inside its region, so its copy lies as the parameter does at rest.
    sharded = config.parallel.zero == 3 or pipelined
    elements = p.rest if sharded else p.use
    return compute_width(config) * elements


def _gradients(config: Config, parameters: list[Placed]) -> int:
    """Return the bytes of gradients, sums included.

    Stages 0 and 1 sum whole gradients, and hold the gradients of one micro-batch beside them. Stages 2 and 3 sum
    shards, and hold one whole layer beside the largest table, which the loss sums in f32.
    """
    stage = config.parallel.zero
    width = compute_width(config)
    # With one micro-batch there is nothing to add to: XLA unrolls the loop of one iteration, and gradients become f32
    # when activations and weights are gone.
    one_micro_batch = config.train.accumulation == 1
    rest = sum(p.rest for p in parameters)
    use = sum(p.use for p in parameters)
    if stage >= 2:
        layer, table = _at_once(parameters)
        shards = F32 * rest
        if not one_micro_batch:
            shards *= 2
        return shards + (F32 + width) * layer + F32 * table
    if one_micro_batch:
        return width * use
    total = (F32 + width) * use
    if stage == 1:
        # The sum is reduced to a shard at the end.
        total += F32 * rest
    return total


def _gradients_of_layers(config: Config, parameters: list[Placed]) -> int:
    """Return the part of `_gradients` that only the backward pass of the layers makes, after that of the loss."""
    width = compute_width(config)
    layer, table = _at_once(parameters)
    if config.parallel.zero >= 2:
        return F32 * sum(p.rest for p in parameters) + (F32 + width) * layer
    return max(0, width * sum(p.use for p in parameters) - F32 * table)


def _weights(config: Config, parameters: list[Placed]) -> int:
    """Return the bytes of weights that a step casts or gathers.

    Stage 0 casts, stages 1 and 2 gather all weights, and stage 3 gathers one layer and the largest table.
    """
    stage = config.parallel.zero
    width = compute_width(config)
    rest = sum(p.rest for p in parameters)
    use = sum(p.use for p in parameters)
    cast = 0
    if config.precision == "bfloat16":
        cast = width * rest
    if use == rest:
        return cast
    if stage == 3:
        return cast + width * sum(_at_once(parameters))
    if config.precision == "mixed":
        # The copy that is kept between steps is what stages 0 to 2 use.
        return 0
    return width * use


def _at_once(parameters: list[Placed]) -> tuple[int, int]:
    """Return the elements in use of one layer, and of the largest parameter that belongs to none.

    Tables are used one after the other. A model without layers has all its parameters in use at once.
    """
    layer = [p.at_once for p in parameters if p.stacked]
    tables = [p.use for p in parameters if not p.stacked]
    if not layer:
        return sum(tables), 0
    return sum(layer), max(tables)
