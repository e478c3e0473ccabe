"""Published ways to split one model over so many GPUs: which fit, and which is the fastest."""

from tests.planning.alternatives import GROUPS, RULES, WAYS, by_rule, chosen


def test_what_ran_out_of_memory_is_predicted_to_and_nothing_else():
    assert [way.name for way in WAYS if way.plain.fits != way.ran] == []
    assert sum(not way.ran for way in WAYS) == 4


def test_the_fastest_is_chosen_but_for_eight_gpus():
    """From 2 GPUs on; among them are different meshes. On eight, Alpa's program gained more from splitting tensors than
    ours is predicted to: it computes nothing while weights travel, and ours does."""
    assert all(len(group) >= 4 and len({(way.data, way.model) for way in group}) >= 2 for group in GROUPS)
    assert [chosen(group).fastest for group in GROUPS] == [True, True, False]
    assert chosen(GROUPS[-1]).name == "8x1, ZeRO 3"


def test_no_rule_finds_all_of_them():
    found = {rule: [by_rule(group, rule).fastest for group in GROUPS] for rule in RULES}
    assert found == {"tensor in a host, then data": [False, False, True], "fully sharded only": [False] * 3}
