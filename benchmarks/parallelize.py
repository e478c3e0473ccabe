"""What `jaxdist.parallelize` sends for a module with a tied embedding, compiled for eight H100s that are not here.

    python benchmarks/parallelize.py

Elements over `data` per parameter, times (N-1)/N, by scope, ZeRO stage and micro-batches, in bfloat16. A third of the
parameters are the table, which is used twice.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxdist
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.planning.cross_compile import compile_apart
from jaxdist.planning.hlo import collectives

VOCAB, EMBED, MLP, DEVICES = 512, 128, 512, 8
PARAMETERS = VOCAB * EMBED + 2 * EMBED * MLP
ROWS = {"words": jax.ShapeDtypeStruct((256, 17), jnp.int32)}


class Tied(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.words = nnx.Embed(VOCAB, EMBED, rngs=rngs)
        self.up = nnx.Linear(EMBED, MLP, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(MLP, EMBED, use_bias=False, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        return self.words.attend(jnp.tanh(self.down(jnp.tanh(self.up(self.words(words))))))


def next_word(module: Tied, batch: dict[str, jax.Array]) -> jax.Array:
    logits = module(batch["words"][:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["words"][:, 1:]).mean()


def lower(scope: str, zero: int, k: int, devices) -> jax.stages.Lowered:
    layout = dict(mesh=f"{DEVICES}x1x1", zero=zero, accumulation=k, scope=scope, precision="bfloat16")
    return jaxdist.parallelize(Tied, next_word, optax.adam(1e-3), devices=devices, **layout).lower(ROWS)


def sent(scope: str, zero: int, k: int) -> float:
    program = compile_apart(partial(lower, scope, zero, k), "h100", DEVICES)
    found = collectives(program.text, abstract_mesh(parse_mesh(f"{DEVICES}x1x1")))
    wire = sum(one.wire * one.array_elements / one.elements for one in found)
    return wire * DEVICES / (DEVICES - 1) / PARAMETERS


def main() -> None:
    print(f"jax {jax.__version__}: elements per parameter at k = 1, 4")
    for scope in ("batch", "rows"):
        for zero in range(4):
            print(f"{scope:<6} ZeRO {zero}  {sent(scope, zero, 1):6.2f} {sent(scope, zero, 4):6.2f}", flush=True)


if __name__ == "__main__":
    import parallelize  # what another process compiles has to come from a module that it can import

    parallelize.main()
