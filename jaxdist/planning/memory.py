"""Predict what one device holds during a step, from the configuration and the abstract parameters alone.

The state between steps is exact: it is the arguments of a step, leaf by leaf as `zero` places them. In bytes per
parameter, with AdamW, where everything divides by the N devices of a ZeRO group (Rajbhandari et al. 2020, figure 1,
without its 2 bytes of gradients, which exist only during a step):

    stage                      0     1         2         3
    float32, bfloat16          12    12/N      12/N      12/N        the f32 parameters are the masters
    mixed                      14    2+12/N    2+12/N    14/N

On a mesh with R replicas, `parallel.replica_zero` makes 12/(N R) of each 12/N: masters and moments are split over the
replicas too, and the copy of mixed is not.

A frozen parameter (LoRA) has the bytes of its own dtype alone, 4 or 2, at any stage over the same devices as others;
of a quantized one, the arrays that hold it are parameters.

With `parallel.offload optimizer`, 8 of each 12 and 12 of each 14 are in host memory. (ZeRO-Offload, Ren et al. 2021,
also updates there; here the device updates, and the state crosses the link once each way.)

Arrays that exist only during a step are estimates: the compiler decides how long each of them lives.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from jaxdist.config import Config
from jaxdist.config.spikes import WINDOW
from jaxdist.config.stacks import stacks_of
from jaxdist.mesh.split import Split, compute_width
from jaxdist.models.foreign import Foreign
from jaxdist.parallel.crossing import with_replicas
from jaxdist.planning import optimizer_state, pipeline_memory, step_bytes
from jaxdist.planning.activations import saved_per_token, working
from jaxdist.planning.frozen import made_of_codes
from jaxdist.planning.memory_habits import UPDATED, Arrays, as_held
from jaxdist.planning.parameter_layout import Placed, by_precision, elements_of
from jaxdist.planning.pipelines import Pipeline
from jaxdist.planning.predicted_collectives import F32, Count
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.sharding import Layout


@dataclass(frozen=True)
class Memory:
    """Bytes per device: whole numbers, or in `held` also arrays of many devices."""

    parameters: Count = 0
    optimizer: Count = 0
    copy: Count = 0
    """The parameters in the compute dtype, where they are kept between steps (precision mixed)."""
    batch: Count = 0
    gradients: Count = 0
    """Sums in f32, and the gradients of one micro-batch beside them: an estimate."""
    weights: Count = 0
    """Weights that are cast or gathered, at the start of a step or layer by layer: an estimate."""
    activations: Count = 0
    """Activations that the forward pass leaves for the backward pass: an estimate."""
    working: Count = 0
    """Arrays that exist only for a moment in either pass: an estimate."""
    variables: Count = 0
    """Batch statistics, and keys and counts of random numbers."""
    in_flight: Count = 0
    """What a step leaves for the next: a delayed gradient, which is exact; or buffers of an asynchronous pipeline, of
    which versions of the weights and batches are exact, and activations are an estimate."""
    errors: Count = 0
    """The residual of gradient compression: f32."""
    common: Count = 0
    """Parameters and momentum of the last outer step, which local steps keep beside each replica's parameters: f32."""
    host: Count = 0
    """Moments and masters that are in host memory between steps, and not on the device: exact."""
    host_activations: Count = 0
    """Inputs of layers that are in host memory from the forward pass to the backward pass: exact."""
    host_traffic: Count = 0
    """Bytes that cross the link between the device and its host in a step, each way."""
    update: Count = 0
    """Room that the offloaded optimizer state needs in the update beyond what is free by then: an estimate."""

    @property
    def arguments(self) -> Count:
        """The bytes that lie on the device between steps: exact, except for what a pipeline has in flight."""
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
            "errors of compression": self.errors,
            "at the last outer step": self.common,
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


def predict(sharded: ShardedModel) -> Memory:
    """Predict the memory of one device of a mesh. The activations of image classifiers are not predicted."""
    if isinstance(sharded.model, Foreign):
        found = _classifier(sharded, sharded.model)
    elif sharded.pipe is not None:
        found = _pipeline(sharded, sharded.pipe)
    else:
        found = _decoder(sharded)
    found = replace(found, update=_update(sharded, found))
    return Memory(**{name: int(count) for name, count in vars(found).items()})


def _classifier(sharded: ShardedModel, model: Foreign) -> Memory:
    """Return the memory of an image classifier, without the update of offloaded state."""
    config = sharded.config
    split = sharded.split
    parameters = sharded.parameters
    at_rest = _at_rest(config, parameters)
    sizes = config.model
    pixels = sizes.image**2 * sizes.channels
    return replace(
        at_rest,
        batch=F32 * split.rows * split.micro_batches * (pixels + 1),
        variables=sum(_bytes(a) for a in jax.tree.leaves(model.variables)),
        gradients=gradients(config, parameters, config.parallel.zero, split.micro_batches, sharded.layout),
        weights=_weights(sharded),
        host_traffic=_host_traffic(config, parameters),
    )


def _pipeline(sharded: ShardedModel, pipe: Pipeline) -> Memory:
    """Return the memory of a rank of a pipeline, without the update of offloaded state."""
    config = sharded.config
    parameters = sharded.parameters
    at_rest = _at_rest(config, parameters, pipe)
    stashed = 0 if pipe.flush else pipeline_memory.in_flight(sharded, pipe)
    return replace(
        at_rest,
        in_flight=at_rest.in_flight + stashed,
        batch=_batch_of_tokens(sharded.split),
        gradients=pipeline_memory.gradients(config, parameters, config.parallel.zero),
        weights=_weights(sharded),
        **pipeline_memory.activations(sharded, pipe),
        host_traffic=_host_traffic(config, parameters),
    )


def _decoder(sharded: ShardedModel) -> Memory:
    """Return the memory of a decoder without a pipeline, without the update of offloaded state."""
    config = sharded.config
    split = sharded.split
    layout = sharded.layout
    parameters = sharded.parameters
    at_rest = _at_rest(config, parameters)
    elements = elements_of(config, [p for p in parameters if p.trained])
    stacks = stacks_of(config.model).values()
    width = split.width
    k = split.micro_batches
    # Groups of micro-batches run one after the other, each with activations of its own.
    groups = 1 if split.inside else k
    saved = sum(stack.layers * saved_per_token(stack, layout, split.saved) for stack in stacks)
    kept = width * split.tokens * k // groups * saved
    to_host = 0
    if split.saved == "offload":
        to_host = kept
    later = int(step_bytes.gradients_of_layers(config.parallel.zero, width, elements))
    freed = 0
    if split.unrolled:
        freed = int(freed_by_layer(config, parameters, config.parallel.zero, kept - to_host))
    return replace(
        at_rest,
        batch=_batch_of_tokens(split),
        gradients=gradients(config, parameters, config.parallel.zero, split.micro_batches, sharded.layout),
        weights=_weights(sharded),
        activations=kept - to_host - freed,
        working=max(working(stack, layout, split.rows, width, split.saved, later=later) for stack in stacks),
        host_activations=to_host,
        host_traffic=_host_traffic(config, parameters) + groups * to_host,
    )


def _at_rest(config: Config, parameters: list[Placed], pipe: Pipeline | None = None) -> Memory:
    """Return what parameters and optimizer state take between steps, without anything else."""
    # The step, the skipped steps, and those skipped in a row; then the optimizer's own counts, which PipeDream's step
    # does not use.
    counters = 3
    if pipe is None or pipe.flush:
        counters += config.optimizer.rule.counters
    if config.numbers.scales_loss:
        # The scale of the loss, and the good steps since it has changed.
        counters += 2
    if config.train.spike:
        # Losses and norms of recent updates, their number, and the spikes.
        counters += 2 * WINDOW + 2
    found = held(config, parameters, config.parallel.zero, pipelined=pipe is not None)
    scalars = with_replicas(config).scalars if any(map(_crossing, parameters)) else 0
    return replace(found, optimizer=found.optimizer + 4 * counters, in_flight=found.in_flight + scalars)


def held(config: Config, parameters: list[Placed], zero: Count, pipelined: Count) -> Memory:
    """Return what parameters and all that belongs to them take between steps, without counters.

    Their elements, ZeRO's stage and whether there is a pipeline may be arrays.
    """
    each = [bytes_at_rest(config, p) for p in parameters]
    learned = [p for p in parameters if p.trained]
    crossing = sum(_crossing(p) for p in learned)
    beside = with_replicas(config).at_rest(crossing, sum(p.held for p in learned), _masters_on_host(config))
    # A frozen parameter has no copy that is kept: it is cast anew in each step.
    kept = learned if config.numbers.keeps_copy else []
    return Memory(
        parameters=sum(one.parameters for one in each),
        optimizer=sum(one.optimizer for one in each),
        host=sum(one.host for one in each) + beside.host,
        copy=sum(step_bytes.copy(zero, p.width(config), p.rest, p.use, pipelined) for p in kept),
        errors=beside.errors,
        in_flight=beside.in_flight,
        common=beside.common,
    )


def _host_traffic(config: Config, parameters: list[Placed]) -> Count:
    """Return the bytes of offloaded state that a step reads and writes; an outer step is another program."""
    if config.parallel.offload == "none":
        return 0
    return sum(bytes_at_rest(config, p).host for p in parameters)


def _batch_of_tokens(split: Split) -> int:
    """Return the bytes of the token batch of a step on one device."""
    # Dropout needs the number of each row.
    return split.micro_batches * step_bytes.micro_batch(split, drawn=1)


def gradients(config: Config, parameters: list[Placed], zero: Count, micro_batches: Count, layout: Layout) -> Count:
    """Return the bytes of gradients of a step without a pipeline, sums included."""
    elements = elements_of(config, [p for p in parameters if p.trained])
    sums = step_bytes.sums_of_gradients(micro_batches, layout)
    return step_bytes.gradients(zero, compute_width(config), elements, sums)


def freed_by_layer(config: Config, parameters: list[Placed], zero: Count, kept: Count) -> Count:
    """Return how many bytes of what layers keep make room for gradients, where no loop holds stacks of both.

    The backward pass of a layer frees what the layer has kept, and leaves its gradients, so that never all of both are
    there.
    """
    layers = elements_of(config, [p for p in parameters if p.trained and p.stacked])
    return np.minimum(kept, step_bytes.stacked_gradients(zero, compute_width(config), layers))


def _update(sharded: ShardedModel, held: Memory) -> int:
    """Return the room that offloaded optimizer state needs in the update, beyond what is free by then."""
    config = sharded.config
    if config.parallel.offload == "none":
        return 0
    parameters = sharded.parameters
    # The update comes when everything but the gradients is gone. By theory the state of all parameters is there.
    at_once = as_held(Arrays(UPDATED, len(parameters), F32), sharded.layout).count
    offloaded = sorted(bytes_at_rest(config, p).host for p in parameters)
    needed = sum(offloaded[-at_once:])
    free = held.weights + held.activations + held.working
    free += max(0, held.gradients - sum(F32 * p.rest for p in parameters if p.trained))
    return max(0, needed - free)


class AtRest(NamedTuple):
    """Bytes of a parameter at rest."""

    parameters: Count
    optimizer: Count
    host: Count
    """Bytes of either that `parallel.offload` moves to host memory."""


def bytes_at_rest(config: Config, p: Placed) -> AtRest:
    """Return the bytes of a parameter at rest: in f32, with precision mixed those of its master.

    A frozen one has nothing beside itself.
    """
    if not p.trained:
        return AtRest(parameters=p.stored * p.held, optimizer=0, host=0)
    master = F32 * p.held
    optimizer = optimizer_state.bytes_of(config.optimizer, p)
    if config.parallel.offload == "none":
        return AtRest(parameters=master, optimizer=optimizer, host=0)
    if _masters_on_host(config):
        # The device keeps the copy in the compute dtype.
        return AtRest(parameters=0, optimizer=0, host=master + optimizer)
    return AtRest(parameters=master, optimizer=0, host=optimizer)


def _masters_on_host(config: Config) -> bool:
    """Return whether the f32 parameters rest in host memory."""
    return config.parallel.offload != "none" and config.numbers.keeps_copy


def _bytes(a: jax.ShapeDtypeStruct) -> int:
    if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
        # A key of JAX's default generator is two words of 32 bits.
        return 8
    return a.size * a.dtype.itemsize


def state(config: Config, p: Placed, pipelined: bool = False) -> int:
    """Return the bytes that a device holds between steps of one parameter and all that belongs to it."""
    return int(held(config, [p], config.parallel.zero, pipelined).arguments)


def _crossing(p: Placed) -> int:
    """Return the elements that a device has of a parameter's gradient when it crosses the replicas."""
    return math.prod(p.shard) if p.place.deferred and p.trained else 0


def _weights(sharded: ShardedModel) -> Count:
    """Return the bytes of weights that a step casts, gathers, makes of codes, or cuts out of the layers."""
    config = sharded.config
    made = made_of_codes(sharded.split, sharded.layout)
    given = (config, sharded.parameters, config.parallel.zero, sharded.layout)
    if sharded.pipe:
        return made + pipeline_memory.weights(*given, sharded.pipe.stages.virtual)
    return made + weights(*given)


def weights(config: Config, parameters: list[Placed], zero: Count, layout: Layout) -> Count:
    """Return the bytes of weights that a step without a pipeline casts, gathers, or cuts out of the layers."""
    total: Count = 0
    for (precision, width), group in by_precision(config, parameters).items():
        total = total + step_bytes.weights(zero, width, elements_of(config, group), precision)
    # For trained weights the estimate of gradients has room for a layer that is cut out: the last gradients are made
    # when few activations are left.
    cut = step_bytes.cut_out(compute_width(config), layout)
    frozen = sum(p.at_once for p in parameters if p.stacked and not p.trained)
    return total + np.where(np.asarray(zero) < 3, cut * frozen, 0)
