"""Published ways to split one model over so many GPUs: which fit, and which is the fastest."""

import pytest

from tests.planning.alternatives import GROUPS, RULES, WAYS, by_rule, chosen

BY_COUNT = [pytest.param(group, id=f"{group[0].gpus} GPUs") for group in GROUPS]


def test_what_ran_out_of_memory_is_predicted_to_and_nothing_else():
    assert [way.name for way in WAYS if way.plain.fits != way.ran] == []
    assert sum(not way.ran for way in WAYS) == 4


@pytest.mark.parametrize("group", BY_COUNT)
def test_the_fastest_of_at_least_four_is_chosen(group):
    """From 2 GPUs on; among them are different meshes."""
    assert len(group) >= 4
    assert len({(way.data, way.model) for way in group}) >= 2
    (fastest,) = [way for way in group if way.fastest]
    assert chosen(group) == fastest


def test_no_rule_finds_all_of_them():
    found = {rule: [by_rule(group, rule).fastest for group in GROUPS] for rule in RULES}
    assert found == {"tensor in a host, then data": [False, False, True], "fully sharded only": [False] * 3}
