"""A graph network on padded graphs, one graph a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

ROWS = 16


class GraphNet(nnx.Module):
    """Messages along the edges of padded graphs, one graph a row."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(4, 16, rngs=rngs)
        self.message, self.update = nnx.Linear(32, 16, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, nodes, senders, receivers, edges):
        def one(nodes, senders, receivers, edges):
            h = jnp.tanh(self.embed(nodes))
            sent = jnp.tanh(self.message(jnp.concatenate([h[senders], h[receivers]], -1))) * edges[:, None]
            got = jax.ops.segment_sum(sent, receivers, num_segments=nodes.shape[0])
            return self.head(jnp.tanh(self.update(jnp.concatenate([h, got], -1))))[:, 0]

        return jax.vmap(one)(nodes, senders, receivers, edges)


def graphs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Graphs of up to 6 nodes and 9 edges; the rest is padding."""
    counts = rng.integers(2, 7, ROWS)
    return {
        "nodes": rng.normal(size=(ROWS, 6, 4)).astype("f"),
        "senders": rng.integers(0, counts[:, None], (ROWS, 9)),
        "receivers": rng.integers(0, counts[:, None], (ROWS, 9)),
        "edges": rng.random((ROWS, 9)) < 0.7,
        "real": np.arange(6) < counts[:, None],
        "target": rng.normal(size=(ROWS, 6)).astype("f"),
    }


def over_nodes(module, batch):
    """A mean over the nodes that are real: a sum and its weight."""
    found = module(batch["nodes"], batch["senders"], batch["receivers"], batch["edges"])
    return jnp.sum((found - batch["target"]) ** 2 * batch["real"]), batch["real"].sum()
