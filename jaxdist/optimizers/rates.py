"""Factors of the learning rate by parameter (`optimizer.rates`): a text of names, such as `embedding=0.5`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from jaxdist.optimizers.rule import Roles

if TYPE_CHECKING:
    import optax

GROUPS: dict[str, Callable[[str], bool]] = {
    "embedding": lambda path: path in ("table", "positions"),
    "head": lambda path: path.split(".")[0] in ("output", "head"),
    "adapters": lambda path: "lora" in path.split("."),
}
"""Whether the path to a parameter, such as "blocks.mlp.up", belongs to what a word names."""

LARGEST = 1000.0
"""A factor above it is a mistake."""

SHOWN = 20
"""How many parameters a sentence names."""


def parse(text: str) -> dict[str, float]:
    """Return the factors by word or pattern, in the order of `text`: `name=factor` with commas between them.

    Raises `ValueError` for what is no such text, and for a name that stands twice.
    """
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, equals, number = (piece.strip() for piece in part.partition("="))
        try:
            factor = float(number)
        except ValueError:
            factor = math.nan
        if not name or not equals or not 0 <= factor <= LARGEST:
            raise ValueError(
                f"'{part.strip()}' must be a name, = and a factor from 0 to {LARGEST:g}, such as embedding=0.5,head=2"
            )
        if name in found:
            raise ValueError(f"'{name}' has two factors; leave one out")
        found[name] = factor
    return found


def matches(name: str, path: str) -> bool:
    """Return whether the path to a parameter belongs to what a word or a pattern names."""
    return GROUPS[name](path) if name in GROUPS else fnmatchcase(path, name)


def factor_of(rates: dict[str, float], path: str) -> float:
    """Return the factor of the parameter at `path`: that of the last name that matches; 1 where none does."""
    return next((factor for name, factor in reversed(rates.items()) if matches(name, path)), 1.0)


def problem_of(text: str, paths: Collection[str]) -> str:
    """Return which names of a valid `text` match none of the parameters at `paths`, with those that exist; else ""."""
    wrong = [name for name in parse(text) if not any(matches(name, path) for path in paths)]
    if not wrong:
        return ""
    words = [word for word, matching in GROUPS.items() if any(map(matching, paths))]
    shown = [*words, *list(paths)[:SHOWN]]
    more = f", and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return (
        f"optimizer.rates names {', '.join(wrong)}, but no parameter that gradients move is called so; choose among "
        f"{', '.join(shown)}{more}; * stands for any text"
    )


def at_rates(
    rule: optax.GradientTransformation, rates: dict[str, float], roles: Roles
) -> optax.GradientTransformationExtraArgs:
    """Return `rule` with each update, weight decay included, multiplied by the factor of its parameter.

    Moments are those of `rule`, and so is its state.
    """
    import jax
    import optax

    inner = optax.with_extra_args_support(rule)

    def factor(path: tuple[object, ...], _: object) -> float:
        return factor_of(rates, jax.tree_util.keystr(path, simple=True, separator="."))

    factors = jax.tree.map_with_path(factor, roles)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        changes, state = inner.update(updates, state, params, **extra)
        return jax.tree.map(lambda change, factor: change * factor, changes, factors), state

    return optax.GradientTransformationExtraArgs(inner.init, update)
