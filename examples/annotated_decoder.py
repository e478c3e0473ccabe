"""A decoder with Flax's own sharding annotations, as public code has them: `rules` make tensor parallelism of them.

python examples/annotated_decoder.py --mesh 2x2x1
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist

WORDS, LENGTH, WIDTH, HEADS, STEPS = 32, 12, 64, 4, 200
RULES = {"heads": ("model",), "mlp": ("model",), "vocab": ("model",), "embed": (), "kv": ()}


def kernel(*names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


class Block(nnx.Module):
    def __init__(self, rngs):
        shape = dict(num_heads=HEADS, in_features=WIDTH, use_bias=False, decode=False)
        heads = dict(kernel_init=kernel("embed", "heads", "kv"), out_kernel_init=kernel("heads", "kv", "embed"))
        self.attention = nnx.MultiHeadAttention(**shape, **heads, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, kernel_init=kernel("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, kernel_init=kernel("mlp", "embed"), rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.words = nnx.Embed(WORDS, WIDTH, embedding_init=kernel("vocab", "embed"), rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, embedding_init=kernel(None, "embed"), rngs=rngs)
        self.blocks = nnx.Sequential(*[Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.words(tokens) + self.places(jnp.arange(tokens.shape[1])[None])
        return self.words.attend(self.blocks(x))


def loss_fn(model, tokens):
    """The first two numbers of a row are free; the others follow from them."""
    logits = model(tokens[:, :-1])[:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 2:]).mean()


def counting(rng, rows):
    """Rows that count in steps of their own, modulo the number of words: 3 5 7 9 ..."""
    first, step = rng.integers(0, WORDS, (rows, 1)), rng.integers(1, 5, (rows, 1))
    return (first + step * np.arange(LENGTH)) % WORDS


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="2x2x1")
    mesh, rng = parser.parse_args().mesh, np.random.default_rng(0)
    trainer = jaxdist.parallelize(Decoder, loss_fn, optax.adamw(5e-3), mesh=mesh, zero=1, rules=RULES)
    state = trainer.init(0)
    for step in range(STEPS):
        state, metrics = trainer.step(state, counting(rng, 32))
        if step % 50 == 0:
            print(f"step {step}  loss {metrics.loss:.4f}")
    print("kernel of up:", trainer.shardings.params["blocks"]["layers"][0]["up"]["kernel"].spec)
    rows = counting(rng, 4)
    for place in range(2, LENGTH):
        found = trainer.apply(state, lambda model, rows, i: model(rows)[:, i - 1].argmax(-1), rows, place)
        rows[:, place] = jax.device_get(found)
    print(*(" ".join(map(str, row)) for row in rows), sep="\n")


if __name__ == "__main__":
    main()
