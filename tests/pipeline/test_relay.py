"""One stream goes through all layers in order, whatever the stages, and each layer leaves its state once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from jaxdist.mesh import PIPELINE, make_mesh, parse_mesh
from jaxdist.parallel import region
from jaxdist.parallel.pipeline.relay import relay
from jaxdist.parallel.pipeline.stages import Stages


@pytest.mark.parametrize(
    "stages",
    [*(Stages.cut(*cut) for cut in [(3, 1, 1), (3, 2, 1), (9, 3, 2), (7, 2, 1, 3)])],
    ids=["one", "uneven", "interleaved", "several kinds"],
)
def test_a_stream_goes_through_all_layers_in_order(stages):
    """Each layer appends its number as a digit, and leaves the stream as its state; padding would append a 9."""
    layers = sum(stages.sizes)
    numbers = np.where(stages.valid, stages.layer + 1, 9)
    mesh = make_mesh(parse_mesh(f"1x1x{stages.ranks}"), jax.devices()[: stages.ranks])

    def layer(w, x, state, place):
        y = 10 * x + w
        old = state[place.chunk, place.layer]
        return y, state.at[place.chunk, place.layer].set(jnp.where(place.counts, y, old))

    def run(blocks):
        x, state = (region.vary(a, (PIPELINE,)) for a in (jnp.zeros((), int), jnp.zeros(blocks[:, 0].shape, int)))
        x, state = relay(stages, layer, blocks[:, 0], x, state)
        return x[None], state[:, None]

    with jax.set_mesh(mesh):
        spec = P(None, PIPELINE)
        blocks = jax.device_put(numbers, jax.NamedSharding(mesh, spec))
        x, state = jax.jit(jax.shard_map(run, in_specs=spec, out_specs=(P(PIPELINE), spec)))(blocks)
    text = "".join(str(number + 1) for number in range(layers))
    assert int(np.asarray(x)[0]) == int(text)
    assert np.asarray(state)[stages.valid].tolist() == [int(text[: n + 1]) for n in stages.layer[stages.valid]]
