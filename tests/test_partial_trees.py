"""Nested dicts with some of the leaves of another."""

import pytest

from jaxdist.parallel.partial_trees import joined, part_of, selected, without

TREE = {"a": 1, "b": {"c": 2, "d": {"e": 3, "f": 4}}, "g": {"h": 5}, "empty": {}}
LEAVES = {"a": 1, "b": {"c": 2, "d": {"e": 3, "f": 4}}, "g": {"h": 5}}

SPLITS = [
    (lambda leaf: leaf % 2 == 1, {"a": 1, "b": {"d": {"e": 3}}, "g": {"h": 5}}, {"b": {"c": 2, "d": {"f": 4}}}),
    (lambda leaf: leaf == 4, {"b": {"d": {"f": 4}}}, {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "g": {"h": 5}}),
    (lambda leaf: True, LEAVES, {}),
    (lambda leaf: False, {}, LEAVES),
]


@pytest.mark.parametrize(("chosen", "some", "rest"), SPLITS, ids=["odd", "one", "all", "none"])
def test_the_selected_and_the_others_are_the_whole_and_no_dict_is_empty(chosen, some, rest):
    found = selected(LEAVES, chosen)
    assert found == some
    assert without(LEAVES, found) == rest
    assert joined(found, rest) == joined(rest, found) == LEAVES


def test_an_empty_dict_is_not_selected():
    assert selected(TREE, lambda leaf: True) == LEAVES


def test_a_part_has_the_leaves_of_one_tree_and_the_names_of_the_other():
    like = {"b": {"d": {"f": None}}, "a": None}
    assert part_of(TREE, like) == {"b": {"d": {"f": 4}}, "a": 1}
    assert part_of({"x": (1, 2)}, {"x": 0}) == {"x": (1, 2)}
    with pytest.raises(KeyError):
        part_of(TREE, {"b": {"z": None}})


def test_of_a_leaf_that_both_have_the_second_counts():
    first = {"a": 1, "b": {"c": 2}}
    second = {"b": {"c": 3, "d": 4}, "e": {"f": 5}}
    assert joined(first, second) == {"a": 1, "b": {"c": 3, "d": 4}, "e": {"f": 5}}
    assert first == {"a": 1, "b": {"c": 2}}
    assert second == {"b": {"c": 3, "d": 4}, "e": {"f": 5}}
