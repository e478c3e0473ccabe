"""FLOPs of a token against the parameters of the model itself, and peaks by precision."""

import jax
import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig
from jaxdist.planning.hardware import GPUS, peak_flops
from jaxdist.planning.timing import flops_formula, flops_of_padding, flops_per_token, in_window
from jaxdist.request import load
from tests.models.roles import decaying


@pytest.mark.parametrize("tied", [True, False])
def test_six_for_each_parameter_that_multiplies_a_token(tied):
    model = models.build(c := ModelConfig(embed=64, heads=4, mlp=96, tied=tied))
    matrix = decaying(model)
    count = sum(w.size for w, m in zip(*map(jax.tree.leaves, (model.abstract, matrix)), strict=True) if m)
    count -= c.sequence * c.embed + (0 if tied else c.vocab * c.embed)  # positions and lookups are no products
    assert flops_per_token(c) == 6 * count + 6 * c.layers * c.sequence * c.embed


@pytest.mark.parametrize(("name", "billions"), [("llama_1b", 1.236), ("llama_8b", 7.505), ("llama_70b", 69.50)])
def test_llama_counts_grouped_heads_and_three_matrices(name, billions):
    """Published: 1.24, 8.03 and 70.6 billion parameters; the lookup table of the untied ones multiplies nothing."""
    c = load(name, {}).model
    matrices = (flops_per_token(c) - 6 * c.layers * c.sequence * c.embed) / 6
    assert matrices / 1e9 == pytest.approx(billions, rel=1e-3)


def attention_flops(**sizes: int) -> int:
    """Of one layer, and one token: what is not 6 for each matrix parameter."""
    c = ModelConfig(family="llama", layers=1, embed=64, heads=4, mlp=96, vocab=8, sequence=1000, **sizes)
    width = 4 * c.head_size
    return flops_per_token(c) - 6 * (4 * 64 * width + 3 * 64 * 96 + 8 * 64)


@pytest.mark.parametrize("window", [1, 10, 400, 999])
def test_attention_in_a_window_counts_the_keys_that_are_seen(window):
    """Each of two products has 2 FLOPs forward and 4 backward for each value of a query with a key.

    Of the mask, half a key is left out for each of the first queries, as half of the diagonal is without a window.
    """
    mask = sum(min(place + 1, window) for place in range(1000))
    assert attention_flops(window=window) == pytest.approx(2 * 6 * 64 * (mask - window / 2) / 1000, abs=1)


def test_a_window_as_long_as_the_row_is_none():
    assert attention_flops(window=1000) == attention_flops(window=5000) == attention_flops()


def test_a_line_about_a_model_names_a_window_that_hides_something():
    c = ModelConfig(sequence=8192, window=4096)
    assert in_window(c) == "; attention in a window of 4,096 tokens"
    assert in_window(c.model_copy(update={"window": 8192})) == in_window(c.model_copy(update={"window": 0})) == ""


def test_attention_is_as_wide_as_its_heads():
    """Twice as wide as the residual stream."""
    assert attention_flops(head_dim=32) == 2 * attention_flops()


def test_the_formula_names_what_it_counts():
    c = ModelConfig(family="llama", embed=64, heads=4, sequence=100)
    told = lambda **sizes: flops_formula(Config(model=c.model_copy(update=sizes))).partition("included) + ")[2]
    assert told() == told(window=100, head_dim=16) == "6 x layers x sequence x embed (causal attention)"
    assert told(head_dim=32) == "6 x layers x sequence x heads x head_dim (causal attention)"
    in_window = "6 x layers x (2 x window - window^2 / sequence) x embed (causal attention in a window)"
    assert told(window=99) == in_window


def test_mixed_computes_at_the_peak_of_bfloat16():
    assert peak_flops("NVIDIA H100 80GB HBM3", "mixed") == peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None


@pytest.fixture(scope="module")
def routed():
    return ModelConfig(family="moe", embed=64, heads=4, experts=8, experts_per_token=2, expert_mlp=96, shared_experts=1)


def test_of_the_experts_only_those_of_a_token_multiply_it(routed):
    """The chosen ones, the shared one, and the router; not the others."""
    c = routed
    layer = 4 * 64 * 64 + 3 * 64 * 96 * (2 + 1) + 64 * 8
    assert flops_per_token(c) == 6 * (c.layers * layer + c.vocab * 64) + 6 * c.layers * c.sequence * 64
    more = c.model_copy(update={"experts": 16})
    assert flops_per_token(more) - flops_per_token(c) == 6 * c.layers * 64 * 8
    assert "active matrix parameters (output table included, 2 of 8 experts)" in flops_formula(Config(model=c))


def test_padding_costs_flops_of_the_chosen_experts_alone(routed):
    assert flops_of_padding(routed, 1.0) == 0
    assert flops_of_padding(routed, 1.5) == 6 * routed.layers * 3 * 64 * 96 * 2 // 2


def test_the_peak_without_matrix_units_is_the_data_sheet_s():
    """67 and 19.5 TFLOP/s in float32 (NVIDIA's data sheets of H100 SXM and A100)."""
    assert [round(GPUS[name].peak_f32 / 1e12, 1) for name in ("h100", "a100")] == [66.9, 19.5]
