"""Nested dicts that hold some of the leaves of another: the parameters that are trained, and the frozen rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tree = dict[str, Any]
"""A nested dict; what is no dict is a leaf."""


def selected(tree: Tree, chosen: Callable[[Any], bool]) -> Tree:
    """Return the leaves for which `chosen(leaf)` is true, in dicts that are not empty."""
    found = {}
    for name, branch in tree.items():
        if not isinstance(branch, dict):
            if chosen(branch):
                found[name] = branch
        elif part := selected(branch, chosen):
            found[name] = part
    return found


def part_of(tree: Tree, like: Tree) -> Tree:
    """Return the leaves of `tree` that have a counterpart in `like`."""
    return {
        name: part_of(tree[name], branch) if isinstance(branch, dict) else tree[name] for name, branch in like.items()
    }


def without(tree: Tree, left_out: Tree) -> Tree:
    """Return the leaves of `tree` that have no counterpart in `left_out`."""
    rest = {}
    for name, branch in tree.items():
        if name not in left_out:
            rest[name] = branch
        elif isinstance(branch, dict) and (part := without(branch, left_out[name])):
            rest[name] = part
    return rest


def joined(first: Tree, second: Tree) -> Tree:
    """Return the leaves of both; one that both have is that of `second`."""
    both = dict(first)
    for name, branch in second.items():
        if isinstance(branch, dict) and name in first:
            both[name] = joined(first[name], branch)
        else:
            both[name] = branch
    return both
