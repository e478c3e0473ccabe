"""A graph network on padded graphs: every device gets a batch of graphs of any sizes, padded to one shape.

python examples/graphs.py --mesh 4x1x1
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdist

GRAPHS, NODES, EDGES, WIDTH, HOPS, STEPS = 8, 96, 192, 32, 3, 100


class GraphNet(nnx.Module):
    """Each node hears from its neighbours, a few times."""

    def __init__(self, rngs):
        self.embed = nnx.Linear(1, WIDTH, rngs=rngs)
        self.hops = nnx.List([nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs) for _ in range(HOPS)])
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, graphs):
        h = nnx.relu(self.embed(graphs["start"][:, None]))
        for hop in self.hops:
            heard = jax.ops.segment_sum(h[graphs["sender"]], graphs["receiver"], num_segments=NODES)
            h = h + nnx.relu(hop(jnp.concatenate([h, heard], -1)))
        return self.head(h)[:, 0]


def loss_fn(model, batch):
    """Sums over the nodes that are real, and their number: jaxdist divides once, over all devices."""
    logits, real = jax.vmap(model)(batch), batch["real"]  # a row of the batch is a whole batch of graphs
    losses = optax.sigmoid_binary_cross_entropy(logits, batch["near"]) * real
    right = ((logits > 0) == batch["near"]) * real
    return {"loss": (losses.sum(), real.sum()), "accuracy": (right.sum(), real.sum())}


def row_of(rng):
    """Random trees with two more edges, side by side: which nodes are at most three hops from the marked one?"""
    start, real, first, edges = np.zeros(NODES, "float32"), np.zeros(NODES, "float32"), 0, []
    for _ in range(GRAPHS):
        nodes = rng.integers(4, 12)
        tree = [(node, rng.integers(0, node)) for node in range(1, nodes)]
        edges.extend(first + np.array([*tree, *rng.integers(0, nodes, (2, 2))]))
        start[first + rng.integers(0, nodes)] = 1
        first += nodes
    real[:first] = 1
    ends = np.full((EDGES, 2), NODES - 1)  # what is left over are edges from the last node, which is padding, to itself
    ends[: 2 * len(edges)] = np.concatenate([edges, np.flip(edges, 1)])
    near, (sender, receiver) = start, ends.T
    for _ in range(HOPS):
        near = near + np.bincount(receiver, near[sender], NODES)
    return {"start": start, "near": near.clip(max=1), "real": real, "sender": sender, "receiver": receiver}


def batch_of(rng, rows):
    return jax.tree.map(lambda *arrays: np.stack(arrays), *[row_of(rng) for _ in range(rows)])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mesh", default="4x1x1")
    mesh, rng = parser.parse_args().mesh, np.random.default_rng(0)
    # Under "rows" a device sees the graphs that lie there, and nothing but sums crosses the network.
    trainer = jaxdist.parallelize(GraphNet, loss_fn, optax.adam(3e-3), mesh=mesh, scope="rows")
    state, rows = trainer.init(0), trainer.mesh.size  # a batch of graphs for each device
    for step in range(STEPS):
        state, metrics = trainer.step(state, batch_of(rng, rows))
        if step % 20 == 0:
            print(f"step {step}  loss {metrics.loss:.4f}  accuracy {metrics.further['accuracy']:.3f}")
    print(f"of new graphs: accuracy {trainer.evaluate(state, batch_of(rng, rows))['accuracy']:.3f}")


if __name__ == "__main__":
    main()
