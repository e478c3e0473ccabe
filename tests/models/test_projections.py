"""Products with weights that are wider than the activations: their gradients are not rounded to the narrow dtype."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models import build_decoder
from jaxdist.parallel.tensor import einsum
from jaxdist.sharding import RULES, Layout
from tests.parity import cases


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_the_gradient_of_a_wide_weight_is_not_rounded(platform):
    mesh = make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])
    layout = replace(Layout.on(mesh, RULES), platform=platform)
    x, w, g = (
        np.asarray(jax.random.normal(jax.random.key(i), shape, jnp.bfloat16), np.float32)
        for i, shape in enumerate([(2, 16, 8), (8, 12), (2, 16, 12)])
    )
    with jax.set_mesh(mesh):
        given = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w)
        made, pull = jax.vjp(lambda x, w: einsum(layout, "BSD,DF->BSF", x, w), *given)
        dx, dw = pull(jnp.asarray(g, jnp.bfloat16))
    assert (made.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_allclose(dw, np.einsum("bsd,bsf->df", x, g), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(made.astype(np.float32), np.einsum("bsd,df->bsf", x, w), rtol=1e-2, atol=1e-2)


def test_which_weights_the_matmuls_cast_themselves():
    model = build_decoder(cases.LLAMA)
    names = {name.removeprefix("blocks.") for name in model.projected}
    assert names == {"attention.qkv", "attention.out", "mlp.gate_up", "mlp.down"}
    layer = jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), model.abstract["blocks"])
    cast = model.cast(layer, jnp.bfloat16, products=False)
    assert cast["mlp"]["gate_up"].dtype == jnp.float32
    assert cast["norm1"]["scale"].dtype == jnp.bfloat16
    assert all(a.dtype == jnp.bfloat16 for a in jax.tree.leaves(model.cast(layer, jnp.bfloat16)))
