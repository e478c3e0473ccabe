"""Model the time of a token on an H100, from the step of generation that is compiled for it: no GPU is needed.

    python benchmarks/decode_target.py [--out RESULTS.txt] [--rows N] [--slots N] [MODEL ...]

First stands what a token has to read, the weights and the cache, and then what the kernels of the program read and
write, with the time that `roofline.py` models: of layers in a loop, and of layers that are written out, as jaxdist has
them on GPUs. Then, of one layer, what attention to the cache reads and writes in several forms. generate.md has the
results.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import roofline
from jax.sharding import SingleDeviceSharding
from telling import teller

from jaxdist.models.decoding import attend_to_slots
from jaxdist.models.scores import Scores
from jaxdist.output.units import size
from jaxdist.programs import kernels, target
from jaxdist.programs.compiled import memory_of, text_of
from jaxdist.programs.hlo_text import parse
from jaxdist.request import load
from jaxdist.training.decoding import Choice, Decoding
from jaxdist.training.forward.cached import CachedForward
from jaxdist.training.run import Run

TARGET = "h100"
MODELS = ("llama_1b", "llama_8b")
GREEDY = Choice(temperature=0.0, top_k=0)
LAYERS = 4
"""Layers of the comparison of forms of attention: more than one, so that they are cut out of a stack."""


def decoding_of(name: str, rows: int) -> Decoding:
    """Return generation by a shipped model on one absent GPU, in bfloat16."""
    knobs = {"precision": "bfloat16", "mesh": "1x1x1", "train.global_batch_size": str(rows)}
    run = Run(load(name, knobs), devices=target.devices(TARGET, 1), gpu=target.gpu_of(TARGET), batch=False)
    return Decoding(run)


def lower(decoding: Decoding, rows: int, slots: int) -> tuple[jax.stages.Lowered, int, int]:
    """Lower a step whose cache has so many slots; return also the bytes of the weights and of the cache."""
    numbers = jax.ShapeDtypeStruct((rows,), np.int32)
    one = jax.ShapeDtypeStruct((), np.int32)
    prompts = jax.ShapeDtypeStruct((rows, 16), np.int32)
    run = decoding.run
    with jax.set_mesh(run.mesh):
        key = jax.eval_shape(lambda: jax.random.key(0))
        weights = jax.eval_shape(decoding.forward.ready, run.engine.abstract_logical().params)
        arguments = (weights, key, prompts, None, numbers, numbers, None)
        cache = jax.eval_shape(lambda *given: decoding.prefill(GREEDY, slots, *given), *arguments)[0]
        step = decoding.extend.lower(GREEDY, slots, weights, cache, numbers, numbers, key, one, None)
    return step, bytes_of(weights), bytes_of(cache)


def bytes_of(tree: object) -> int:
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def model_lines(name: str, rows: int, slots: int, tell: Callable[[str], None]) -> None:
    """Tell what a token costs, with layers in a loop and written out."""
    tell(f"jax {jax.__version__}, {TARGET}: {name}, {rows} rows, {slots:,} slots, bfloat16")
    chosen = CachedForward.apart
    for form, apart in ("in a loop", False), ("written out", True):
        CachedForward.apart = apart
        decoding = decoding_of(name, rows)
        step, weights, cache = lower(decoding, rows, slots)
        if not apart:
            least = (weights + cache) / roofline.RATES.memory
            tell(f"    {size(weights)} of weights, {size(cache)} of cache: read once in {1e3 * least:.2f} ms")
        start = time.perf_counter()
        program = step.compile()
        took = time.perf_counter() - start
        text = text_of(program)
        moved = kernels.kernels(text).bytes
        seconds = roofline.Roofline(text, decoding.run.mesh).time.total
        tell(
            f"    layers {form:<11} {1e3 * seconds:6.2f} ms, {size(moved)} read and written, "
            f"temporaries {size(memory_of(program).temp_size_in_bytes)}, compiled in {took:.0f} s"
        )
    CachedForward.apart = chosen


def plain(q: jax.Array, k: jax.Array, v: jax.Array, last: jax.Array) -> jax.Array:
    """jaxdist's own."""
    tokens = jnp.broadcast_to(jnp.arange(k.shape[2]), (k.shape[0], k.shape[2]))
    return attend_to_slots(Scores.of(q.shape[3]), q, k, v, tokens, last).out.astype(q.dtype)


def public(q: jax.Array, k: jax.Array, v: jax.Array, last: jax.Array) -> jax.Array:
    """cuDNN's as `jax.nn` offers it, for keys [B, C, K, H]."""
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    return jax.nn.dot_product_attention(q, keys, values, key_value_seq_lengths=last + 1, implementation="cudnn")


def private(q: jax.Array, k: jax.Array, v: jax.Array, last: jax.Array) -> jax.Array:
    """cuDNN's by a private module of JAX, which takes keys [B, K, C, H], as they lie in the cache."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    found = cudnn.dot_product_attention(
        q.swapaxes(1, 2),
        k,
        v,
        q_seqlen=jnp.ones(len(last), jnp.int32),
        kv_seqlen=last + 1,
        scale=q.shape[3] ** -0.5,
        mask_type=cudnn.MaskType.PADDING,
        qkv_layout="BNTH",
    )
    return found.swapaxes(1, 2)


FORMS = {"plain": plain, "cuDNN, private": private, "cuDNN, public": public}
Attend = Callable[..., jax.Array]


def attention_line(name: str, attend: Attend, stacked: bool, rows: int, slots: int) -> str:
    """Compile attention to a cache by some layers, which is written to first; return a line on one of them.

    The sizes are those of Llama 8B: 32 query heads and 8 key/value heads, of size 128.
    """
    device = target.devices(TARGET, 1)[0]

    def of(*shape: int, dtype: type = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device))

    def layers(q: jax.Array, k: list[jax.Array], v: list[jax.Array], last: jax.Array) -> tuple[object, ...]:
        row = jnp.arange(rows)
        for layer in range(LAYERS):
            new = q[:, 0, ::4]
            if stacked:
                k, v = (a.at[layer, row, :, last].set(new) for a in (k, v))
            else:
                k, v = ([*a[:layer], a[layer].at[row, :, last].set(new), *a[layer + 1 :]] for a in (k, v))
            q = attend(q, k[layer], v[layer], last)
        return q, k, v

    cache = of(LAYERS, rows, 8, slots, 128) if stacked else [of(rows, 8, slots, 128)] * LAYERS
    step = jax.jit(layers, donate_argnums=(1, 2)).lower(of(rows, 1, 32, 128), cache, cache, of(rows, dtype=jnp.int32))
    text = text_of(step.compile())
    reader = kernels.Reader(parse(text))
    moved: Counter[str] = Counter()
    for one, times in reader.run():
        moved[one.name.strip("%").split(".")[0]] += times * reader.moved_bytes(one)
    parts = ", ".join(f"{kernel} {size(count // LAYERS)}" for kernel, count in moved.most_common() if count > 2**22)
    where = "one stack" if stacked else "arrays of their own"
    return f"    {name:<14} in {where:<19} {size(moved.total() // LAYERS)}: {parts}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"names of shipped models; {' and '.join(MODELS)} by default")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--out", type=Path, help="add the lines to this file too")
    asked = parser.parse_args()
    tell = teller(asked.out)
    # Otherwise JAX's CUDA plug-in looks for a GPU, and fails.
    jax.config.update("jax_platforms", "cpu")
    for name in asked.models or MODELS:
        model_lines(name, asked.rows, asked.slots, tell)
    each = 2 * asked.rows * 8 * asked.slots * 128 * 2
    tell(f"jax {jax.__version__}, {TARGET}: attention of a layer of 8B to {size(each)} of keys and values")
    for name, attend in FORMS.items():
        for stacked in (True, False):
            tell(attention_line(name, attend, stacked, asked.rows, asked.slots))


if __name__ == "__main__":
    main()
