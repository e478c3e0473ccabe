"""Worker: jaxdist's own train step on the CPU devices of one process, as many as `--mesh` needs."""

from __future__ import annotations

import argparse
from importlib.metadata import version

import jax
import jax.numpy as jnp
import work

from jaxdist import models
from jaxdist.cluster import runtime
from jaxdist.config import ModelConfig, OptimizerConfig
from jaxdist.mesh import parse_mesh
from jaxdist.sharding import RULES, Layout
from jaxdist.training.optimizer import optimizer
from jaxdist.training.step import Step

MODEL = ModelConfig(
    layers=work.LAYERS, embed=work.EMBED, heads=work.HEADS, sequence=work.SEQUENCE, vocab=work.VOCAB, tied=True
)
ADAMW = OptimizerConfig(
    learning_rate=work.LEARNING_RATE,
    beta1=work.BETAS[0],
    beta2=work.BETAS[1],
    weight_decay=work.WEIGHT_DECAY,
    schedule="constant",
    decay_fraction=0,
    warmup=0,
    clip=0,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="1x1x1", help="data x model x pipeline")
    parser.add_argument("--zero", type=int, choices=range(4), default=0)
    parser.add_argument("--whole-vocab", action="store_true", help="the embedding table is not split over model")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()

    mesh = runtime.start(parse_mesh(args.mesh))
    layout = Layout.on(mesh, {**RULES, "vocab": ()} if args.whole_vocab else RULES)
    model = models.build(MODEL, layout)
    rule = optimizer(ADAMW, steps=1000, matrices=models.matrices(model))
    step = Step(model, layout, rule, dtype=jnp.dtype(args.precision), stage=args.zero)

    def put(a, *logical):
        return jax.device_put(a[None], jax.sharding.NamedSharding(mesh, layout.spec((None, *logical))))

    with jax.set_mesh(mesh):
        whole = jax.device_put(work.weights(), jax.sharding.NamedSharding(mesh, jax.P()))
        state = jax.jit(lambda weights: step.start(step.place(weights)))(whole)
        del whole
        tokens, labels = (put(a, "batch", None) for a in work.batch())
        batch = {"tokens": tokens, "labels": labels, "rows": put(jnp.arange(work.ROWS, dtype=jnp.int32), "batch")}
        train = jax.jit(step.train, donate_argnums=0).lower(state, batch).compile()

        def take() -> float:
            nonlocal state
            state, metrics = jax.block_until_ready(train(state, batch))
            return float(metrics.loss)

        work.serve(take, matmul, library=f"jax {version('jax')}", mesh=args.mesh)


def matmul(a, b):
    a, b = jax.device_put(a), jax.device_put(b)
    product = jax.jit(jnp.matmul)
    return lambda: product(a, b).block_until_ready()


if __name__ == "__main__":
    main()
