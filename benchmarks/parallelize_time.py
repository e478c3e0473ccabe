"""The step of `jaxdist.parallelize` beside the same module, loss and optimizer under plain `jax.jit`, on CPU devices.

    taskset -c 0 python benchmarks/parallelize_time.py [--pairs 12] [--steps 5] [--only tied] [--zero 0 3]

The plain step is what one writes with `NamedSharding` and Auto axes: rows over `data`, parameters and optimizer state
whole (ZeRO 0) or split over `data` on the first dim that divides (ZeRO 3), everything donated. Both sides get rows of
NumPy and put them onto the devices. Both return the loss and the norm of the gradient, and skip an update where one of
them is not finite. `parallelize` also counts steps, rows and skipped steps, and checks state and batch.

Printed is the CPU time of `parallelize` over that of the plain step: of both as they are, and, as *without guard*, over
a plain step that neither takes the norm nor skips. XLA uses no threads within a device. Before it stand the FLOPs of
a device's program and the bytes that it accesses, as XLA counts them: also those of `parallelize` over the others.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from plain_modules import LENGTH, MODULES, VOCAB, next_word
from turns import ratios, sentence

import jaxdist

DEVICES = 2
ROWS = {"words": np.random.default_rng(0).integers(0, VOCAB, (16, LENGTH + 1), np.int32)}
Step = Callable[[], jax.Array]
"""Takes a step from the state that it keeps, and returns the loss."""


def ours(name: str, zero: int) -> tuple[Step, jax.stages.Lowered]:
    """Return the step of `parallelize`, and its program."""
    trainer = jaxdist.parallelize(MODULES[name], next_word, optax.adamw(1e-3), mesh=f"{DEVICES}x1x1", zero=zero)
    state = trainer.init(0)

    def step() -> jax.Array:
        nonlocal state
        state, metrics = trainer.step(state, ROWS)
        return metrics.loss

    return step, trainer.lower(ROWS)


def plain(name: str, zero: int, guard: bool) -> tuple[Step, jax.stages.Lowered]:
    """Return the step under `jax.jit`, and its program."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    graph, params = nnx.split(MODULES[name](nnx.Rngs(0)))
    optimizer = optax.adamw(1e-3)

    def lies(a: jax.Array) -> NamedSharding:
        dim = next((dim for dim, size in enumerate(a.shape) if zero and size % DEVICES == 0), None)
        return NamedSharding(mesh, PartitionSpec() if dim is None else PartitionSpec(*(None,) * dim, "data"))

    state = params, optimizer.init(params)
    shardings = jax.tree.map(lies, state)
    state = jax.device_put(state, shardings)

    def loss_of(params: nnx.State, batch: dict[str, jax.Array]) -> jax.Array:
        return next_word(nnx.merge(graph, params), batch)

    @partial(jax.jit, donate_argnums=0, out_shardings=(shardings, None))
    def update(state: tuple, batch: dict[str, jax.Array]) -> tuple:
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, new = optimizer.update(gradients, moments, params)
        after = optax.apply_updates(params, updates), new
        if not guard:
            return after, (loss,)
        norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), after, state), (loss, norm)

    put = partial(jax.device_put, ROWS, NamedSharding(mesh, PartitionSpec("data")))

    def step() -> jax.Array:
        nonlocal state
        state, (loss, *_) = update(state, put())
        return loss

    return step, update.lower(state, put())


def turn(step: Step, steps: int) -> float:
    """Take some steps, and return their CPU seconds."""
    started = time.process_time()
    for _ in range(steps):
        loss = step()
    jax.block_until_ready(loss)
    return time.process_time() - started


def counted(one: jax.stages.Lowered, other: jax.stages.Lowered) -> str:
    """Return what XLA counts in the first program over what it counts in the second, as text."""
    costs, others = one.compile().cost_analysis(), other.compile().cost_analysis()
    return ", ".join(f"{name} {costs[name] / others[name]:.3f}" for name in ("flops", "bytes accessed"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of turns; 0 only counts")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--zero", type=int, nargs="+", choices=(0, 3), default=(0, 3))
    parser.add_argument("--only", choices=MODULES, action="append")
    asked = parser.parse_args()
    print(f"jax {jax.__version__}, flax {flax.__version__}, {DEVICES} CPU devices, load {os.getloadavg()[0]:.1f}")
    for name in asked.only or MODULES:
        for zero in asked.zero:
            own, program = ours(name, zero)
            losses = [float(own()) for _ in range(3)]
            for guard in (True, False):
                other, beside = plain(name, zero, guard)
                if guard:
                    print(f"{name:<8} ZeRO {zero}  losses {losses} {[float(other()) for _ in range(3)]}")
                what = "the same work" if guard else "without guard"
                print(f"  {what}: {counted(program, beside)}", end="")
                if asked.pairs:
                    found = ratios(partial(turn, other, asked.steps), partial(turn, own, asked.steps), asked.pairs)
                    print(f"; CPU time {sentence(found)}", end="")
                print(flush=True)


if __name__ == "__main__":
    main()
