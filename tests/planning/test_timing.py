"""FLOPs of a token against the parameters of the model itself, and peaks by precision."""

import jax
import pytest

from jaxdist import models
from jaxdist.config import ModelConfig
from jaxdist.planning.hardware import peak_flops
from jaxdist.planning.timing import flops_per_token
from jaxdist.request import load


@pytest.mark.parametrize("tied", [True, False])
def test_six_for_each_parameter_that_multiplies_a_token(tied):
    model = models.build(c := ModelConfig(embed=64, heads=4, mlp=96, tied=tied))
    matrix = models.matrices(model)
    count = sum(w.size for w, m in zip(*map(jax.tree.leaves, (model.abstract, matrix)), strict=True) if m)
    count -= c.sequence * c.embed + (0 if tied else c.vocab * c.embed)  # positions and lookups are no products
    assert flops_per_token(c) == 6 * count + 6 * c.layers * c.sequence * c.embed


@pytest.mark.parametrize(("name", "billions"), [("llama_1b", 1.236), ("llama_8b", 7.505), ("llama_70b", 69.50)])
def test_llama_counts_grouped_heads_and_three_matrices(name, billions):
    """Published: 1.24, 8.03 and 70.6 billion parameters; the lookup table of the untied ones multiplies nothing."""
    c = load(name, {}).model
    matrices = (flops_per_token(c) - 6 * c.layers * c.sequence * c.embed) / 6
    assert matrices / 1e9 == pytest.approx(billions, rel=1e-3)


def test_mixed_computes_at_the_peak_of_bfloat16():
    assert peak_flops("NVIDIA H100 80GB HBM3", "mixed") == peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
