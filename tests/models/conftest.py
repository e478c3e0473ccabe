"""One device, for models alone."""

import jax
import pytest

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.sharding import Layout


@pytest.fixture
def one_device():
    mesh = make_mesh(parse_mesh("1x1x1"), jax.devices()[:1])
    with jax.set_mesh(mesh), jax.numpy_rank_promotion("allow"):
        yield Layout.on(mesh)
