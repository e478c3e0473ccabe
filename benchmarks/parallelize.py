"""What `jaxdist.parallelize` sends for modules of one's own, compiled for eight H100s that are not here.

    python benchmarks/parallelize.py

Elements over `data` per parameter, times (N-1)/N, in bfloat16. First a module with a tied embedding, by scope, ZeRO
stage and micro-batches: a third of its parameters are the table, which is used twice. Then a decoder without tied
weights, as a list of layers and as a stack of them that `jaxdist.scan` runs.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from plain_modules import LENGTH, MODULES, next_word

import jaxdist
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.programs.cross_compile import compile_apart
from jaxdist.programs.hlo import collectives

DEVICES = 8
ROWS = {"words": jax.ShapeDtypeStruct((256, LENGTH + 1), jnp.int32)}


def lower(name: str, scope: str, zero: int, k: int, devices) -> jax.stages.Lowered:
    layout = dict(mesh=f"{DEVICES}x1x1", zero=zero, accumulation=k, scope=scope, precision="bfloat16")
    return jaxdist.parallelize(MODULES[name], next_word, optax.adam(1e-3), devices=devices, **layout).lower(ROWS)


def sent(name: str, scope: str, zero: int, k: int) -> float:
    program = compile_apart(partial(lower, name, scope, zero, k), "h100", DEVICES)
    found = collectives(program.text, abstract_mesh(parse_mesh(f"{DEVICES}x1x1")))
    wire = sum(one.wire * one.array_elements / one.elements for one in found)
    abstract = nnx.eval_shape(lambda: nnx.state(MODULES[name](nnx.Rngs(0)), nnx.Param))
    return wire * DEVICES / (DEVICES - 1) / sum(a.size for a in jax.tree.leaves(abstract))


def main() -> None:
    print(f"jax {jax.__version__}: elements per parameter at k = 1, 4")
    for scope in ("batch", "rows"):
        for zero in range(4):
            one, four = (sent("tied", scope, zero, k) for k in (1, 4))
            print(f"tied     {scope:<6} ZeRO {zero}  {one:6.2f} {four:6.2f}", flush=True)
    for name in ("decoder", "stacked"):
        for zero in (0, 2, 3):
            print(f"{name:<8} batch  ZeRO {zero}  {sent(name, 'batch', zero, 1):6.2f}", flush=True)


if __name__ == "__main__":
    import parallelize  # what another process compiles has to come from a module that it can import

    parallelize.main()
