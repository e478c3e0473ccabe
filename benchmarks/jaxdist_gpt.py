"""Worker: the program that `python -m jaxdist.train` compiles, on as many CPU devices of a process as `--mesh` asks."""

from __future__ import annotations

import argparse
from importlib.metadata import version

import jax
import jax.numpy as jnp
import work

from jaxdist.request import load
from jaxdist.training.run import Run

ASKED = {
    "model.layers": work.LAYERS,
    "model.embed": work.EMBED,
    "model.heads": work.HEADS,
    "model.sequence": work.SEQUENCE,
    "model.vocab": work.VOCAB,
    "model.tied": True,
    "train.global_batch_size": work.ROWS,
    "train.steps": 1000,
    "optimizer.learning_rate": work.LEARNING_RATE,
    "optimizer.beta1": work.BETAS[0],
    "optimizer.beta2": work.BETAS[1],
    "optimizer.weight_decay": work.WEIGHT_DECAY,
    "optimizer.schedule": "constant",
    "optimizer.decay_fraction": 0,
    "optimizer.warmup": 0,
    "optimizer.clip": 0,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", default="1x1x1", help="data x model x pipeline")
    parser.add_argument("--zero", type=int, choices=range(4), default=0)
    parser.add_argument("--whole-vocab", action="store_true", help="the embedding table is not split over model")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    args = parser.parse_args()

    asked = {"mesh": args.mesh, "precision": args.precision, "parallel.zero": args.zero, **ASKED}
    if args.whole_vocab:
        asked["parallel.rules.vocab"] = ""
    run = Run(load(None, {name: str(value).lower() for name, value in asked.items()}))

    def put(a, *logical):
        return jax.device_put(a[None], jax.sharding.NamedSharding(run.mesh, run.layout.spec((None, *logical))))

    with jax.set_mesh(run.mesh):
        whole = jax.device_put(work.weights(), jax.sharding.NamedSharding(run.mesh, jax.P()))
        state = jax.jit(lambda weights: run.step.start(run.step.place(weights)))(whole)
        del whole
        tokens, labels = (put(a, "batch", None) for a in work.batch())
        batch = {"tokens": tokens, "labels": labels, "rows": put(jnp.arange(work.ROWS, dtype=jnp.int32), "batch")}
        train = run.compile()

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
