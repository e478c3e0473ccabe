"""How many rows the experts are predicted to compute, and what is said of their number."""

import re

import numpy as np
import pytest

from jaxdist import models
from jaxdist.config import Config, ModelConfig, TrainConfig
from jaxdist.mesh import parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.planning import model_report
from jaxdist.planning.expert_rows import IMBALANCE, all_rounds, first_round, padding, rows_of_queue
from jaxdist.planning.predicted_collectives import ALL_GATHER, ALL_TO_ALL, Transfer


def routed(**more) -> ModelConfig:
    return ModelConfig(family="moe", experts=16, experts_per_token=4, heads=8, **more)


def test_the_first_round_has_room_for_the_capacity_of_each_expert():
    """1024 tokens ask for 4096 rows, 256 of each expert; 250 tokens for 62.5 each, of which 78.1 are padded to 80."""
    assert first_round(routed(), 1024) == 16 * 320
    assert padding(routed(), 1024) == 1.25
    assert first_round(routed(), 250) == 16 * 80
    assert padding(routed(), 250) == pytest.approx(1.28)


@pytest.mark.parametrize(("factor", "rows"), [(2.0, 512), (1.25, 320), (1.0, 256 + 64), (0.5, 128 + 6 * 32)])
def test_what_has_no_room_in_the_first_round_takes_further_ones(factor, rows):
    """The longest queue is taken to have 320 rows, a quarter more than the mean."""
    m = routed(capacity_factor=factor)
    assert rows_of_queue(m, 1024) == rows >= IMBALANCE * 256
    first, times, further = all_rounds(m, 1024)
    assert (first, first + times * further) == (256 * factor, rows)


def test_a_search_asks_for_many_at_once():
    tokens = np.array([[1024.0, 250.0, 1024.0], [8.0, 64.0, 250.0]])
    alone = [[rows_of_queue(routed(), count) for count in row] for row in tokens]
    assert np.array_equal(rows_of_queue(routed(), tokens), alone)


def request(mesh: str, **more) -> Split:
    config = Config(mesh=mesh, model=routed(**more), train=TrainConfig(global_batch_size=16, accumulation=2))
    return Split(config, parse_mesh(mesh))


def test_a_report_says_where_experts_are_and_what_capacity_adds():
    first, second = model_report.experts(request("data=2,expert=4", shared_experts=1))
    assert first == "16 in each layer, 4 of them on each device; a token goes through 4 and 1 shared by all"
    assert second.startswith(
        "a micro-batch of 128 tokens on a device asks for 512 rows; the first round computes 640 (1.25"
    )
    (alone, _) = model_report.experts(request("data=8"))
    assert alone == "16 in each layer; a token goes through 4"
    assert model_report.experts(Split(Config(), {})) == []


def test_padding_adds_flops_that_mfu_does_not_count():
    """A quarter of the experts' 6 for each parameter of the 4 chosen."""
    split = request("data=8")
    useful, padded = re.findall("([0-9,]+)(?: FLOPs| with)", model_report.arithmetic(split))
    m = split.config.model
    more = int(padded.replace(",", "")) - int(useful.replace(",", ""))
    assert more == m.layers * 6 * 3 * m.embed * m.expert_size * 4 // 4


def test_only_rows_of_experts_are_said_to_be_sent_to_them():
    rows = Transfer("rows", ALL_TO_ALL, ("expert",), 4, 5, 1024, 2)
    others = [
        Transfer("weights", ALL_GATHER, ("expert",), 4, 1, 4096, 2),
        Transfer("int8", ALL_TO_ALL, ("replica",), 4, 1, 9, 1),
    ]
    assert (
        model_report.exchanged([rows, *others]) == "a device sends 2 KiB per step to experts of other devices and back"
    )
    assert model_report.exchanged(others) == ""


def test_the_size_of_a_model_tells_what_is_active():
    """Of 16 experts of each layer 4; the balance is no parameter of a token."""
    m = routed()
    model = models.build(m)
    expert = m.layers * 3 * m.embed * m.expert_size
    assert models.parameters(model) - models.active_parameters(model, m) == 12 * expert
    assert model_report.model_size(m, model).endswith(
        f"{models.active_parameters(model, m):,} of them active for a token"
    )
    dense = ModelConfig()
    assert "active" not in model_report.model_size(dense, models.build(dense))
