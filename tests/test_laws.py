"""Laws of JAX that jaxdist's code obeys, found by experiment (docs/design.md): each is still true, and still obeyed.

Where a test shows a behaviour of JAX alone, its failure on a newer JAX means that the law, and the code that obeys it,
can be looked at again.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P

from jaxdist.config import RequestError
from jaxdist.mesh import AXES, fill, make_mesh, parse_mesh
from jaxdist.models.parameters import normal
from jaxdist.sharding import RULES, Layout, spread
from tests.pipeline.toy import Piped, count

pytestmark = pytest.mark.smoke


@pytest.fixture
def on_two():
    """Two data ranks; a scale that is `reduced` over them, and rows that they split."""
    mesh = make_mesh(parse_mesh("2x1x1"), jax.devices()[:2])
    put = lambda a, spec: jax.device_put(a, jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        yield put(jnp.arange(3.0), P(reduced={"data"})), put(jnp.ones((4, 3)), P("data"))


def test_elementwise_operations_refuse_reduced_weights(on_two):
    scale, rows = on_two
    with pytest.raises(Exception, match="reduced"):
        jax.jit(lambda w, x: w[None] * x).trace(scale, rows)


def test_spread_takes_reduced_weights_and_leaves_their_gradient_a_partial_sum(on_two):
    scale, rows = on_two
    found = jax.jit(lambda w, x: spread(w, x) * x)(scale, rows)
    assert found.tolist() == [[0, 1, 2]] * 4
    loss = lambda w, x: jnp.sum(spread(w, x) * x)
    gradient = jax.eval_shape(jax.grad(loss), scale, rows)
    assert gradient.sharding.spec.unreduced == {"data"}


def test_no_layout_names_an_axis_of_one_device():
    """`reduced` over such an axis fails to lower. By the rules, `replica` would split a batch too, `model` an MLP."""
    mesh = make_mesh(parse_mesh("4x1x2"), jax.devices())
    layout = Layout.on(mesh, RULES)
    assert mesh.axis_names == AXES
    assert dict(layout.axes) == {"data": 4, "pipeline": 2}
    assert layout.spec(("batch", "mlp", "stages")) == P("data", None, "pipeline")


def test_a_pipeline_is_one_manual_region():
    """With all that opens one elsewhere: data ranks with ZeRO 3, tensor and sequence parallelism."""
    piped = Piped("2x2x2", "1f1b", zero=3, sequence=True)
    assert count(piped.program(), "shard_map") == 0  # `program` takes the only one there is around it


def test_jax_drops_devices_silently_and_a_mesh_of_ours_does_not():
    assert jax.device_count() == 8
    assert jax.make_mesh((3, 2), ("data", "model")).size == 6
    with pytest.raises(RequestError, match="mesh data=3 model=2 does not use all devices, of which there are 8:"):
        fill(parse_mesh("3x2x1"), 8)


def test_initial_numbers_have_the_same_bits_on_every_jax():
    """Sums of integers: 0.3675, -1.7928, -0.0861 and -0.4554 on jax 0.10.2."""
    bits = np.asarray(normal(jax.random.key(0), (4,), 1.0)).view(np.uint32)
    assert bits.tolist() == [1052519966, 3219487261, 3182446951, 3202953348]
