"""The step of a mixture of experts beside one whose rows are sorted already, on one CPU device.

    python benchmarks/experts.py [--rounds 10] [--widths 256 512]

64 experts, of which each token goes through 8. The step to compare with multiplies the same T k rows by a batched
einsum, T k / E of them by each expert: token t goes to experts that its number alone decides. So it has no queues, no
gathers, no capacity and no loop; router, attention, head and optimizer are the same. All programs take turns, step by
step. Printed are medians, and the median of each turn's ratio to the sorted step.

even      every token's experts are drawn at random, so that loads are as even as a balanced router makes them
new       a router with its first weights, whose loads are not: more rounds, or more room in the first
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from statistics import median
from unittest.mock import patch

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import flax
import jax
import jax.numpy as jnp

from jaxdist.bench.measuring import Timed, measure_together, random_work
from jaxdist.config import Config
from jaxdist.models import experts
from jaxdist.parallel.experts import Dispatch
from jaxdist.training.run import Run

SIZES = dict(family="moe", layers=2, embed=256, heads=8, vocab=4096, sequence=256, experts=64, experts_per_token=8)
ROWS = 8
CASES = (("even", 1.0), ("even", 1.25), ("even", 1.5), ("new", 1.25), ("new", 1.75))
"""The router, and the room of the first round over the even share."""


def sorted_rows(
    self: Dispatch, x: jax.Array, p: jax.Array, choice: jax.Array, gate_up: jax.Array, down: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Take the place of `Dispatch.__call__`: the j-th choice of a token is an expert of its own T k / E tokens."""
    tokens, embed = x.shape
    k = p.shape[1]
    count = len(gate_up)
    rows = jnp.broadcast_to(x, (k, tokens, embed)).reshape(count, -1, embed)
    h = jnp.einsum("ERD,EDG->ERG", rows, gate_up.reshape(count, embed, -1))
    gate, up = jnp.split(h, 2, axis=-1)
    h = jax.nn.silu(gate) * up * p.T.reshape(count, -1, 1)
    y = jnp.einsum("ERF,EFD->ERD", h, down)
    return jnp.sum(y.reshape(k, tokens, embed), 0), jnp.ones((), jnp.int32)


def drawn(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Take the place of `lax.top_k` in the router: experts that have nothing to do with the scores."""
    return jax.lax.top_k(jax.random.uniform(jax.random.key(0), scores.shape), k)


@contextmanager
def exchanged(form: str) -> Iterator[None]:
    """Exchange what makes the step of this form while it is traced; nothing that was traced before is kept."""
    jax.clear_caches()
    if form == "sorted":
        with patch.object(Dispatch, "__call__", sorted_rows):
            yield
    elif form == "even":
        with patch.object(experts, "lax", _Drawing()):
            yield
    else:
        yield


class _Drawing:
    """`jax.lax` with another `top_k`."""

    top_k = staticmethod(drawn)

    def __getattr__(self, name: str) -> object:
        return getattr(jax.lax, name)


def run_of(width: int, factor: float) -> Run:
    """Return a run whose experts have this width, and whose first round has room for `factor` times the even share."""
    return Run(
        Config(
            mesh="1x1x1",
            precision="float32",
            model=dict(expert_mlp=width, capacity_factor=factor, **SIZES),
            train=dict(global_batch_size=ROWS),
            optimizer=dict(learning_rate=1e-12),
        )
    )


@cache
def loads(form: str, factor: float) -> tuple[float, float]:
    """Return (the fullest expert of any layer over the mean, the rounds of a layer), of experts of width 8."""
    run = run_of(8, factor)
    run.steps = 1
    with exchanged(form), jax.set_mesh(run.mesh):
        state = run.engine.init()
        aux_of = jax.jit(lambda *arguments: run.forward.gradients(*arguments)[-1])
        aux = aux_of(state.params, {}, random_work(run), jnp.asarray(0))
    tokens = ROWS * SIZES["sequence"]
    even = tokens * SIZES["experts_per_token"] / SIZES["experts"]
    rounds = aux["meter"][:, experts.METERS.index("dispatch_rounds")] / tokens
    return float(jnp.max(aux["load"]) / even), float(jnp.mean(rounds))


def compare(width: int, rounds: int) -> None:
    """Print a line for each case."""
    with exchanged("sorted"):
        least = Timed.compile(run_of(width, 1.0))
    timed = []
    for form, factor in CASES:
        with exchanged(form):
            timed.append(Timed.compile(run_of(width, factor)))
    measure_together([least, *timed], 1, rounds)
    print(f"{width:>5}  sorted                             {_figures(least)}")
    for (form, factor), one in zip(CASES, timed, strict=True):
        ratio = median(a / b for a, b in zip(one.seconds, least.seconds, strict=True))
        fullest, turns = loads(form, factor)
        router = f"{form:<6}  {factor:>6}  {fullest:>9.2f}  {turns:>6.1f}"
        print(f"{width:>5}  {router}  {_figures(one)}  {ratio:>8.2f}", flush=True)


def _figures(one: Timed) -> str:
    temporaries = one.program.memory_analysis().temp_size_in_bytes / 2**20
    return f"{median(one.seconds) * 1e3:>8.0f}  {temporaries:>16.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512], help="F: how wide an expert is")
    asked = parser.parse_args()
    print(f"jax {jax.__version__}, flax {flax.__version__}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(", ".join(f"{name} {value}" for name, value in SIZES.items()) + f", {ROWS} rows")
    print("    F  router  factor   max/mean  rounds        ms  temporaries, MiB  / sorted")
    for width in asked.widths:
        compare(width, asked.rounds)


if __name__ == "__main__":
    main()
