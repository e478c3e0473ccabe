"""The rate of one matmul of PyTorch or of XLA on this CPU, by dtype, in shapes of the step of `compare_torch.py`.

    PYTHON benchmarks/matmuls.py torch
    PYTHON benchmarks/matmuls.py jax

where PYTHON is an interpreter that has that library. Both use all cores. XLA's matmul in bfloat16 returns float32,
which is rounded, as jaxdist asks for on CPUs (`jaxdist.parallel.matmul`). The best of 7 turns of 5 products counts.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator

SHAPES = (
    (2048, 256, 768),
    (2048, 256, 1024),
    (2048, 1024, 256),
    (2048, 256, 8192),
    (2048, 8192, 256),
    (256, 2048, 8192),
)
"""m x k by k x n: projections of a block, the logits, and the gradients of both."""

DTYPES = ("float32", "bfloat16")
Multiply = Callable[[], object]


def of_torch(m: int, k: int, n: int, dtype: str) -> Multiply:
    """Return a product of PyTorch."""
    import torch

    a, b = (torch.randn(shape).to(getattr(torch, dtype)) for shape in ((m, k), (k, n)))
    return lambda: a @ b


def of_jax(m: int, k: int, n: int, dtype: str) -> Multiply:
    """Return a product of XLA, compiled."""
    import jax
    import jax.numpy as jnp

    a, b = (jax.random.normal(jax.random.key(0), shape).astype(dtype) for shape in ((m, k), (k, n)))
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32).astype(dtype))
    return lambda: product(a, b).block_until_ready()


def seconds(multiply: Multiply) -> float:
    """Return the seconds of a product."""
    found = []
    for _ in range(8):
        began = time.perf_counter()
        for _ in range(5):
            multiply()
        found.append((time.perf_counter() - began) / 5)
    return min(found[1:])


def lines(library: str) -> Iterator[str]:
    """Yield a line for each shape and dtype."""
    make = {"torch": of_torch, "jax": of_jax}[library]
    for m, k, n in SHAPES:
        for dtype in DTYPES:
            rate = 2 * m * k * n / seconds(make(m, k, n, dtype))
            yield f"{library:<5}  {m:>4} x {k:>4} by {k:>4} x {n:>4}  {dtype:<8}  {rate / 1e9:4.0f} GF/s"


if __name__ == "__main__":
    for line in lines(sys.argv[1]):
        print(line, flush=True)
