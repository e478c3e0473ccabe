"""Rules tables that a user passes, and what they split."""

import jax
import pytest

from jaxdist.config import Config, ParallelConfig
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.sharding import RULES, Layout


def layout(**rules) -> Layout:
    return Layout.on(make_mesh(parse_mesh("4x2x1"), jax.devices()[:8]), {**RULES, **rules})


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"mlp": ("modle",)}, "split mlp over a mesh axis 'modle'; did you mean 'model'"),
        ({"mlpp": ("model",)}, "a logical axis 'mlpp'; did you mean 'mlp'"),
        ({"mlp": "model"}, "give a tuple of mesh axes, such as ('model',)"),
    ],
)
def test_names_that_do_not_exist_are_refused(rules, told):
    with pytest.raises(ValueError, match="the rules") as error:
        layout(**rules)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("rules", "dims", "told"),
    [
        ({"embed": ("model",)}, ("embed", "mlp"), "embed and mlp of one array to the mesh axis 'model'"),
        ({"mlp": ("data",)}, ("batch", "sequence", "mlp"), "batch and mlp of one array to the mesh axis 'data'"),
    ],
)
def test_two_dims_of_one_array_on_one_mesh_axis_are_refused(rules, dims, told):
    with pytest.raises(ValueError, match="the rules") as error:
        layout(**rules).spec(dims)
    assert told in str(error.value)


def test_a_table_of_ones_own():
    assert layout(vocab=(), mlp=("model",)).spec(("vocab", "mlp", "embed")) == jax.P(None, "model", None)


@pytest.mark.parametrize(("asked", "further"), [(False, ()), (True, ("model",))])
def test_a_sequence_that_context_splits_is_no_sequence_parallelism(asked, further):
    """That is what splits the residual stream further, and what XLA's options for it look for."""
    config = Config(parallel=ParallelConfig(sequence=asked))
    mesh = make_mesh(parse_mesh("context=2,model=2"), jax.devices()[:4])
    on = Layout.of(Split(config, mesh.shape), mesh)
    assert on.split("residual") == ("context", *further)
    assert on.sequence_parallel == further
