"""How many FLOPs the products of a layer are, where the last round of tiles leaves cores idle."""

import numpy as np
import pytest

from jaxdist.planning.hardware import GPUS
from jaxdist.planning.search.products import layer_products
from jaxdist.planning.timing import matrices_per_layer
from jaxdist.request import load

CORES = GPUS["a100"].cores


@pytest.mark.parametrize(
    ("name", "sizes"), [("gpt2_124m", {}), ("llama_8b", {}), ("llama_8b", {"model.head_dim": "256"})]
)
def test_without_known_cores_they_are_what_matrices_say(name, sizes):
    m = load(name, sizes).model
    assert layer_products(m, 1000, 1, "cpu") == pytest.approx((2 * 1000 * matrices_per_layer(m),) * 3)


def test_experts_multiply_the_rows_of_all_rounds():
    """As their matrices say, but for a quarter more rows of the chosen ones; the router is not among them."""
    sizes = {"model.family": "moe", "model.experts": "16", "model.experts_per_token": "4", "model.shared_experts": "1"}
    m = load("llama_1b", sizes).model
    chosen = 4 * 3 * m.embed * m.expert_size
    wanted = 2 * 4096 * (matrices_per_layer(m) - m.embed * m.experts + chosen / 4)
    assert layer_products(m, 4096, 1, "cpu") == pytest.approx((wanted,) * 3)
    less_capacity = m.model_copy(update={"capacity_factor": 0.5})
    assert layer_products(less_capacity, 4096, 1, "cpu") == layer_products(m, 4096, 1, "cpu")


def test_experts_spread_over_devices_fill_their_tiles():
    """Sixteen devices have 1 expert each and the rows of all 16: the same FLOPs, in fewer tiles that are not full."""
    sizes = {"model.family": "moe", "model.experts": "16", "model.experts_per_token": "1"}
    m = load("llama_1b", sizes).model
    exact, spread = (sum(layer_products(m, 1024, 1, "cpu", ways)) for ways in (1, 16))
    assert exact == spread
    alone, spread = (sum(layer_products(m, 1024, 1, "a100", ways)) for ways in (1, 16))
    assert spread < alone


def test_full_rounds_leave_nothing_idle():
    """As many rows of tiles as cores, and edges of all matrices that divide by those of a tile."""
    m = load("llama_8b", {}).model
    exact, whole = layer_products(m, 256 * CORES, 1, "cpu"), layer_products(m, 256 * CORES, 1, "a100")
    assert whole[:2] == pytest.approx(exact[:2])


def test_one_tile_more_is_a_round_more():
    """The time of one more round."""
    m = load("gpt2_124m", {"model.embed": "128", "model.heads": "1", "model.mlp": "128"}).model
    tiles = lambda rows: layer_products(m, rows, 1, "a100")[1] / (2 * 256 * 128 * (128 * 3 + 3 * 128))
    assert tiles(256 * CORES) == CORES
    assert tiles(256 * CORES + 1) == 2 * CORES


def test_eight_devices_that_split_a_layer_take_more_than_an_eighth():
    m = load("gpt2_124m", {"model.embed": "6144", "model.heads": "64"}).model
    one, eight = (sum(layer_products(m, 8192, ways, "a100")) for ways in (1, 8))
    assert 1.05 < 8 * eight / one < 1.15


def test_a_search_asks_for_many_at_once():
    m = load("gpt2_124m", {}).model
    tokens, ways = np.array([1024.0, 4096.0]), np.array([1, 4])
    together = layer_products(m, tokens, ways, "h100")
    alone = [layer_products(m, t, w, "h100") for t, w in zip(tokens, ways, strict=True)]
    assert np.array_equal(np.stack(together, axis=1), np.array(alone))
