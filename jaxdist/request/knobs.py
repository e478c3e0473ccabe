"""The knobs by their dotted names, and the words for them: types, near misses, and what pydantic found wrong."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from jaxdist.config import Config


def _walk(section: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    found: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        found |= _walk(field.annotation, f"{prefix}{name}.") if nested else {prefix + name: field}
    return found


KNOBS = _walk(Config)
"""Every knob: `{"mesh": ..., "model.layers": ...}`."""


def _about(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, field in section.model_fields.items():
        if prefix + name not in KNOBS:
            found |= {prefix + name: field.annotation.__doc__} | _about(field.annotation, f"{prefix}{name}.")
    return found


SECTIONS = _about(Config)
"""Every section and what it is about: `{"model": ..., "parallel": ..., "parallel.rules": ...}`."""

RULES = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be more than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "finite_number": "must be a finite number",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text, in quotes",
    "string_too_short": "must have at least {min_length} character",
}
"""What pydantic's errors mean, by their type."""

BOUNDS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number", "float32")


def canonical(name: str) -> str:
    """The dotted name as `Config` spells it: hyphens are underscores."""
    return name.replace("-", "_")


def option(name: str) -> str:
    """How a knob is written on the command line."""
    return "--" + name.replace("_", "-")


def value_of(config: Config, name: str) -> Any:
    """The value of a knob by its dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def nest(values: dict[str, Any]) -> dict[str, Any]:
    """`{"model.layers": 4}` as `{"model": {"layers": 4}}`."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        place = nested
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return nested


def from_text(name: str, text: str) -> Any:
    """What `text` on the command line says for a knob, as pydantic takes it: it never takes "3" for the choice 3."""
    field = KNOBS[name]
    if text == "none" and field.default is None:
        return None
    choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return {str(choice): choice for choice in choices}.get(text, text)


def within(name: str, chosen: Iterable[str]) -> bool:
    """Whether the knob `name`, or its section, is among `chosen`."""
    return any(name == one or name.startswith(one + ".") for one in chosen)


def suggest(name: str, names: Iterable[str], form: Callable[[str], str] = str) -> str:
    """`did you mean 'x'?`: the same word in another section, a near miss, or else what is valid; written by `form`."""
    names = list(names)
    last = name.rpartition(".")[2]
    if name in SECTIONS:
        return f"{name} is a section; its knobs are {', '.join(form(n) for n in names if within(n, [name]))}"
    siblings = _siblings(name, names)
    word = lambda n: n.rpartition(".")[2]
    close = [n for n in siblings if word(n) == last] or [n for n in names if word(n) == last]
    for pool in siblings, names:
        if not close and (match := difflib.get_close_matches(last, map(word, pool), n=1)):
            close = [n for n in pool if word(n) == match[0]]
    if close:
        return f"did you mean {' or '.join(repr(form(n)) for n in close)}?"
    valid = siblings or [n for n in names if "." not in n]
    return f"valid names are {', '.join(map(form, valid))}{'' if siblings else '; --help lists every knob'}"


def _siblings(name: str, names: Iterable[str]) -> list[str]:
    """Those of `names` in the innermost section of `name` that exists."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in SECTIONS:
            return [n for n in names if within(n, [name])]
    return []


def kind(annotation: Any) -> str:
    """A word for the type of a knob: `int`, `path`, `a|b|c`."""
    if get_origin(annotation) is Annotated:
        return kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(map(str, get_args(annotation)))
    if any(Path in (one, *get_args(one)) for one in (annotation, *get_args(annotation))):
        return "path"
    return {bool: "true|false", str: "text"}.get(annotation) or getattr(annotation, "__name__", "value")


def shown(value: object) -> str:
    """A value as a person would write it, cut where it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    text = {None: "none", "": "empty"}[value] if value in (None, "") else repr(value)
    return text if len(text) <= 80 else text[:76] + " ..."


def sentence(name: str, value: object, error: dict[str, Any], annotation: Any) -> str:
    """One of pydantic's errors in our words, such as `model.layers is -3: must be at least 1`."""
    rule, context = error["type"], error.get("ctx", {})
    if rule == "literal_error":
        choices = [str(choice) for choice in get_args(annotation)]
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        return f"{name} is {shown(value)}: valid are {', '.join(choices)}{hint}"
    if isinstance(value, list) and kind(annotation) == "path":  # what people try first with several texts
        return f"{name} is {shown(value)}: must be one path, in quotes; join several texts into one file"
    bounds = {key: f"{bound:g}" if isinstance(bound, float) else bound for key, bound in context.items()}
    words = RULES[rule].format(**bounds) if rule in RULES else error["msg"][:1].lower() + error["msg"][1:]
    return f"{name} is {value if rule in BOUNDS else shown(value)}: {words}"
