"""The knobs by their dotted names, and their texts: types, suggestions for misspelt names, and pydantic's errors."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from jaxdist.config import Config
from jaxdist.config.mixture import MixtureConfig
from jaxdist.config.values import FilePaths, MixtureTable


def _fields(section: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = {}
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            fields.update(_fields(field.annotation, f"{prefix}{name}."))
        else:
            fields[prefix + name] = field
    return fields


KNOBS = _fields(Config)
"""Every knob: `{"mesh": ..., "model.layers": ...}`."""


def _sections(section: type[BaseModel], prefix: str = "") -> dict[str, str]:
    sections: dict[str, str] = {}
    for name, field in section.model_fields.items():
        if prefix + name not in KNOBS:
            inner = field.annotation
            # Whatever is no knob is a section.
            assert isinstance(inner, type)
            assert issubclass(inner, BaseModel)
            sections[prefix + name] = inner.__doc__ or ""
            sections.update(_sections(inner, f"{prefix}{name}."))
    return sections


SECTIONS = _sections(Config)
"""Every section with its description: `{"model": ..., "parallel": ..., "parallel.rules": ...}`."""

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
"""Texts for pydantic's errors, by their type."""

BOUNDS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than", "finite_number", "float32")
"""Errors of numbers, whose value is printed without quotes."""


def canonical(name: str) -> str:
    """Return the dotted name as `Config` spells it, with underscores for hyphens."""
    return name.replace("-", "_")


def option(name: str) -> str:
    """Return a name as it is written on the command line."""
    return "--" + name.replace("_", "-")


def value_of(config: Config, name: str) -> Any:
    """Return the value of a knob, given its dotted name."""
    return functools.reduce(getattr, name.split("."), config)


def nest(values: dict[str, Any]) -> dict[str, Any]:
    """Return `{"model.layers": 4}` as `{"model": {"layers": 4}}`."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        table = nested
        for section in sections:
            table = table.setdefault(section, {})
        table[last] = value
    return nested


def from_text(name: str, text: str) -> Any:
    """Return the value that `text` on the command line gives a knob, in the form in which pydantic accepts it."""
    field = KNOBS[name]
    if text == "none" and field.default is None:
        return None
    if get_origin(field.annotation) is Literal:
        # Pydantic would not accept "3" for the choice 3.
        for choice in get_args(field.annotation):
            if str(choice) == text:
                return choice
    return text


def within(name: str, chosen: Iterable[str]) -> bool:
    """Return whether the knob `name`, or its section, is among `chosen`."""
    return any(name == one or name.startswith(one + ".") for one in chosen)


ELSEWHERE = {
    **dict.fromkeys(("lr", "max_lr", "peak_lr"), "optimizer.learning_rate"),
    **dict.fromkeys(("warmup_steps", "warmup_iters"), "optimizer.warmup"),
    **dict.fromkeys(("dtype", "bf16", "fp16", "fp32", "amp", "mixed_precision"), "precision"),
    **dict.fromkeys(("fsdp", "zero_stage", "sharding"), "parallel.zero"),
    **dict.fromkeys(("dp", "tp", "pp", "cp", "ep", "dp_size", "tp_size", "pp_size", "devices", "gpus"), "mesh"),
    **dict.fromkeys(("output_dir", "out_dir", "outdir", "save_dir", "log_dir", "workdir"), "run_dir"),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "width"), "model.embed"),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "d_ff"), "model.mlp"),
    **dict.fromkeys(("n_layer", "num_layers", "num_hidden_layers", "depth"), "model.layers"),
    **dict.fromkeys(("n_head", "num_heads", "num_attention_heads"), "model.heads"),
    **dict.fromkeys(("seq_len", "seq_length", "block_size", "context_length", "max_length"), "model.sequence"),
    **dict.fromkeys(("vocab_size",), "model.vocab"),
    **dict.fromkeys(("grad_accum", "grad_accum_steps", "gradient_accumulation_steps"), "train.accumulation"),
    **dict.fromkeys(("max_steps", "max_iters", "iterations", "num_steps"), "train.steps"),
    **dict.fromkeys(("num_epochs", "num_train_epochs"), "train.epochs"),
    **dict.fromkeys(("save_steps", "save_every", "save_interval", "interval"), "checkpoint.every"),
    **dict.fromkeys(("eval_steps", "eval_every", "eval_interval"), "validation.every"),
    **dict.fromkeys(("log_interval", "logging_steps"), "log.every"),
    **dict.fromkeys(("dataset", "data_path", "data_dir", "file", "files", "train_file"), "data.path"),
    **dict.fromkeys(("checkpoint_path", "resume_from_checkpoint", "load"), "resume"),
}
"""What other trainers call a knob, by the last word of the name: people write what they know."""

SIMILAR = 0.6
"""How similar two words of one section must be, from 0 to 1."""

SIMILAR_ANYWHERE = 0.7
"""The same of words of different sections, among which there is always a word that is a bit similar."""


def suggest(name: str, names: Iterable[str], form: Callable[[str], str] = str) -> str:
    """Return `did you mean 'x'?` for an invalid name, or the valid names if none is close.

    A name counts as close if its last word is the same, in this section or another, is what other trainers call it
    (`ELSEWHERE`), or is similar. `form` writes a name, for example as an option.
    """
    names = list(names)
    if name in SECTIONS:
        return f"{name} is a section; its knobs are {', '.join(form(n) for n in names if within(n, [name]))}"
    siblings = _siblings(name, names)
    close = _close(name, siblings, names)
    if close:
        return f"did you mean {' or '.join(repr(form(n)) for n in close)}?"
    if siblings:
        return f"valid names are {', '.join(form(n) for n in siblings)}"
    top = [n for n in names if "." not in n]
    return f"valid names are {', '.join(form(n) for n in top)}; --help lists every knob"


def _close(name: str, siblings: list[str], names: list[str]) -> list[str]:
    """Return the names with the same last word as `name`, or else with a similar one; siblings come first."""
    last = _last_word(name)
    same = [n for n in siblings if _last_word(n) == last]
    if same:
        return same
    if ELSEWHERE.get(last) in names:
        return [ELSEWHERE[last]]
    same = [n for n in names if _last_word(n) == last]
    if same:
        return same
    for pool, similar in ((siblings, SIMILAR), (names, SIMILAR_ANYWHERE)):
        match = difflib.get_close_matches(last, [_last_word(n) for n in pool], n=1, cutoff=similar)
        if match:
            return [n for n in pool if _last_word(n) == match[0]]
    return []


def _last_word(name: str) -> str:
    return name.rpartition(".")[2]


def _siblings(name: str, names: Iterable[str]) -> list[str]:
    """Return the `names` in the innermost section of `name` that exists."""
    while "." in name:
        name = name.rpartition(".")[0]
        if name in SECTIONS:
            return [n for n in names if within(n, [name])]
    return []


def kind(annotation: Any) -> str:
    """Return a word for the type of a knob: `int`, `path`, `a|b|c`."""
    if get_origin(annotation) is Annotated:
        return kind(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation))
    # The type of a path may be annotated, optional, or both.
    if _names_files(annotation) or any(Path in (part, *get_args(part)) for part in (annotation, *get_args(annotation))):
        return "path"
    if MixtureTable in get_args(annotation):
        return "table"
    if annotation is bool:
        return "true|false"
    if annotation is str:
        return "text"
    return getattr(annotation, "__name__", "value")


def _names_files(annotation: Any) -> bool:
    return FilePaths in (annotation, *get_args(annotation))


def shown(value: object) -> str:
    """Return a value as a user would write it, shortened if it is long."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | MixtureConfig):
        return "a table"
    if value is None:
        return "none"
    if value == "":
        return "empty"
    text = repr(value)
    if len(text) > 80:
        return text[:76] + " ..."
    return text


def unquoted(value: object) -> str:
    """Return a value as `shown` does, but a single word without quotes, for tables."""
    if isinstance(value, str) and value.split() == [value]:
        return value
    return shown(value)


def sentence(name: str, value: object, error: ErrorDetails, annotation: Any) -> str:
    """Return one of pydantic's errors as a sentence, such as `model.layers is -3: must be at least 1`."""
    rule = error["type"]
    context = error.get("ctx", {})
    if rule == "literal_error":
        choices = [str(choice) for choice in get_args(annotation)]
        close = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        return f"{name} is {shown(value)}: valid are {', '.join(choices)}{hint}"
    # A list is what users try first with several texts.
    if isinstance(value, list) and kind(annotation) == "path":
        if _names_files(annotation):
            return f'{name} is {shown(value)}: must be one text; write paths with commas between them, "a,b"'
        return f"{name} is {shown(value)}: must be one path, in quotes"
    if rule in RULES:
        bounds = {key: f"{bound:g}" if isinstance(bound, float) else bound for key, bound in context.items()}
        reason = RULES[rule].format(**bounds)
    else:
        reason = error["msg"][:1].lower() + error["msg"][1:]
    text = value if rule in BOUNDS else shown(value)
    return f"{name} is {text}: {reason}"
