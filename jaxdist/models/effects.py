"""Find what the call of a module changes in it: a step keeps its variables, and refuses what it cannot keep."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxdist.parallel.dataflow import returned
from jaxdist.sharding import Params, named

MODES = ("deterministic", "use_running_average")
"""The attributes that `nnx.Module.train` and `nnx.Module.eval` set."""

PARAMETERS = (
    "parameters are made in __init__ and changed by the optimizer alone: keep state in an nnx.Variable, or in an "
    "nnx.BatchStat if it is a mean over the rows"
)
VARIABLES = (
    "a step keeps what a module holds as it was built: make such variables in its constructor, or do not store them"
)


def call(
    make: Callable[[Params], nnx.Module], params: Params, use: Callable[[nnx.Module], Any]
) -> tuple[Any, nnx.Module]:
    """Return `use(make(params))`, and the module after it.

    Raises `ValueError` where the call has changed parameters, or an attribute that holds no array.
    """

    def params_after() -> Params:
        module = make(params)
        use(module)
        return params_of(module)

    module = make(params)
    before = settings(module)
    result = use(module)
    _check_params(params, params_of(module), params_after)
    _check_settings(before, settings(module))
    return result, module


def params_of(module: nnx.Module) -> Params:
    """Return the parameters of a module."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def variables_of(module: nnx.Module, before: Params | None = None) -> Params:
    """Return all arrays of a module but its parameters, and but what a call has sown beside those it had `before`.

    `nnx.Module.sow` makes an `nnx.Intermediate`, which is for the caller to read, and not for the next call.
    """
    known = named(before or {})

    def is_sown(path: tuple[Any, ...], value: Any) -> bool:
        return before is not None and isinstance(value, nnx.Intermediate) and ".".join(map(str, path)) not in known

    return nnx.to_pure_dict(nnx.state(module, nnx.All(nnx.Not(nnx.Param), nnx.Not(is_sown))))


def check_variables(before: Params, after: Params) -> None:
    """Raise `ValueError` where a call has left a module with other variables, or changed a shape or dtype."""
    _check_kinds(before, after, "", VARIABLES)


def settings(module: nnx.Module) -> dict[str, Any]:
    """Return the attributes of a module and its parts that hold no arrays, by name.

    The modes are left out: a loss function may set them before it calls the module, and does so in every step.
    """
    found = {}
    for path, part in nnx.iter_graph(module):
        # Dicts and lists are parts too, but have no attributes of their own.
        if not isinstance(part, nnx.Pytree):
            continue
        for name, value in vars(part).items():
            if name.startswith("_pytree__") or name in MODES or _holds_arrays(part, name):
                continue
            # A copy, so that a change in place is seen too.
            if isinstance(value, list | dict | set):
                value = copy.copy(value)
            found[".".join(map(str, (*path, name)))] = value
    return found


def _holds_arrays(part: nnx.Pytree, name: str) -> bool:
    """Return what Flax noted when the attribute was first set; all items of its lists hold arrays."""
    if isinstance(part, nnx.List):
        return name.isdigit()
    return part._pytree__nodes.get(name, False)


def _check_params(before: Params, after: Params, again: Callable[[], Params]) -> None:
    """Raise `ValueError` where a call has left a module with other parameters.

    `again` makes the call once more and returns the parameters after it.
    """
    _check_kinds(before, after, "parameter ", PARAMETERS)
    old = named(before)
    new = named(after)
    # A parameter that has gone through `nnx.remat` or `nnx.jit` is another object, and only the jaxpr of the call says
    # that it is the same array.
    others = [name for name in old if new[name] is not old[name]]
    if not others:
        return

    def others_again() -> list[Any]:
        found = named(again())
        return [found[name] for name in others]

    same = returned(others_again, [old[name] for name in others])
    assigned = [name for name, unchanged in zip(others, same, strict=True) if not unchanged]
    if assigned:
        raise ValueError(f"calling the module assigns parameter {', '.join(assigned)}; {PARAMETERS}")


def _check_settings(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Raise `ValueError` where a call has changed an attribute that is no array: the next step would not see it."""
    changed = [
        name
        for name in sorted({*before, *after})
        if name not in before or name not in after or not _equal(before[name], after[name])
    ]
    if changed:
        raise ValueError(
            f"calling the module changes {', '.join(changed[:4])}, which the next step would not see because it is no "
            f"nnx.Variable; make it one in __init__, or do not store it"
        )


def _check_kinds(before: Params, after: Params, what: str, remedy: str) -> None:
    """Raise `ValueError` unless both have the same names, shapes and dtypes."""
    old = {name: (leaf.shape, leaf.dtype) for name, leaf in named(before).items()}
    new = {name: (leaf.shape, leaf.dtype) for name, leaf in named(after).items()}
    changes = {
        "adds": new.keys() - old.keys(),
        "removes": old.keys() - new.keys(),
        "changes the shape or dtype of": {name for name in old.keys() & new if old[name] != new[name]},
    }
    for verb, names in changes.items():
        if names:
            raise ValueError(f"calling the module {verb} {what}{', '.join(sorted(names))}; {remedy}")


def _equal(a: Any, b: Any) -> bool:
    """Return whether two attributes are equal; False where their `==` raises or gives no truth value."""
    if a is b:
        return True
    if isinstance(a, list | tuple) and type(a) is type(b):
        return len(a) == len(b) and all(map(_equal, a, b))
    try:
        return bool(a == b)
    except Exception:
        return False
