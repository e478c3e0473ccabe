"""A TOML file and the command line's values as one `Config`; and a `Config` as TOML."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxdist import __version__
from jaxdist.config import Config, RequestError, leaves, nearest
from jaxdist.files import read_toml
from jaxdist.request import checks
from jaxdist.request.knobs import KNOBS, SECTIONS, canonical, from_text, nest, option, sentence, shown, suggest, within
from jaxdist.values import path_error

SHIPPED = {path.stem: path for path in sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))}
"""The configs inside the package, by name."""

DEFAULT = "gpt_tiny"


@dataclass
class Source:
    """What a file or a command line sets: the good values, the knobs that failed, a sentence for each mistake."""

    values: dict[str, Any] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)


def load(config: str | None, overrides: Mapping[str, str], knobs: Collection[str] | None = None) -> Config:
    """The configuration that a file, or the shipped one of that name, and the command line ask for together.

    `config` None is the shipped `gpt_tiny`. `overrides` holds dotted names and the text that was given for them; they
    win over the file, which wins over the defaults. `knobs` are those, or the sections, that a command uses; None is
    all: others may not be overridden, and what only concerns others is not checked.
    Raises `RequestError` with every mistake, a sentence each.
    """
    result, problems = read(config, overrides, knobs=knobs)
    if problems:
        raise RequestError(*problems)
    return result


def usual_warmup(steps: int, epochs: float) -> int:
    """`optimizer.warmup` where nobody asks for one: the default, which has to fit a short run of so many steps."""
    default = KNOBS["optimizer.warmup"].default
    return default if epochs else min(default, steps // 5)


def read(
    config: str | None,
    overrides: Mapping[str, str],
    failed: Iterable[str] = (),
    knobs: Collection[str] | None = None,
    also: Iterable[str] = (),
) -> tuple[Config, list[str]]:
    """As `load`, but returns the mistakes; where there are any, the configuration has defaults in their place.

    `failed` are knobs that went wrong on the command line before; `also` are names that a misspelt one may mean.
    """
    used = KNOBS if knobs is None else [name for name in KNOBS if within(name, knobs)]
    name, file = _read_config(config)
    line = _read_overrides(overrides, used, also)
    line.failed |= set(failed)
    _choose_length(file, line)
    values = file.values | line.values
    if values.get("run_dir") is None:
        values["run_dir"] = Path("runs") / name
    if "optimizer.warmup" not in values:
        steps = values.get("train.steps", KNOBS["train.steps"].default)
        values["optimizer.warmup"] = usual_warmup(steps, values.get("train.epochs", 0.0))
    result = Config.model_validate(nest(values))
    broken = (file.failed - set(line.values)) | line.failed
    return result, file.problems + line.problems + checks.problems(result, set(used) - broken)


def _read_config(config: str | None) -> tuple[str, Source]:
    """The config's name, and what its file sets."""
    config = DEFAULT if config is None else config
    if path := SHIPPED.get(canonical(config)):
        return path.stem, _read_file(path)
    path = Path(config)
    if not config:
        problem = "config is empty; name a TOML file or a shipped config, or leave it out"
    elif wrong := path_error(path):
        problem = f"config {shown(config)} {wrong}"
    elif os.path.isdir(path):
        problem = f"config '{config}' is a folder; name a TOML file in it, such as {path / 'config.toml'}"
    elif not os.path.exists(path):
        problem = f"config '{config}' is neither a file nor a shipped config; {nearest(canonical(config), SHIPPED)}"
    else:
        return path.stem, _read_file(path)
    return DEFAULT, Source(failed=set(KNOBS), problems=[problem])


def _read_file(path: Path) -> Source:
    try:
        tables = read_toml(path)
    except ValueError as error:  # not TOML, not UTF-8, a number of thousands of digits
        return Source(failed=set(KNOBS), problems=[f"config {path} is not valid TOML: {error}"])
    except OSError as error:
        return Source(failed=set(KNOBS), problems=[f"config {path} cannot be read: {error.strerror or error}"])
    given, problems = _flatten(tables, path)
    # strict, so that "4" is no number and 1 is not true; as JSON, because only there may text become a path
    strict = lambda values: Config.model_validate_json(json.dumps(nest(values), default=str), strict=True)
    source = _validate(given, strict, where=f"{path}: ")
    return Source(source.values, source.failed, problems + source.problems)


def _flatten(tables: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """The file's keys by dotted name, and a sentence for each that does not exist or stands twice."""
    given: dict[str, Any] = {}
    problems: list[str] = []

    def walk(table: dict[str, Any], prefix: str) -> None:
        for key, value in table.items():
            name = prefix + canonical(key)
            if name in SECTIONS and isinstance(value, dict):
                walk(value, name + ".")
            elif name in given:
                problems.append(f"{path}: {name} is set twice, with hyphens and with underscores; keep one")
            elif name in KNOBS:
                given[name] = value
            elif isinstance(value, dict):
                problems.append(f"{path}: unknown section '{prefix}{key}'; {nearest(name, SECTIONS)}")
            else:
                problems.append(f"{path}: unknown key '{prefix}{key}'; {suggest(name, KNOBS)}")

    walk(tables, "")
    return given, problems


def _read_overrides(overrides: Mapping[str, str], used: Collection[str], also: Iterable[str]) -> Source:
    given: dict[str, Any] = {}
    problems: list[str] = []
    for name, text in overrides.items():
        name = canonical(name)
        if name not in KNOBS:
            problems.append(f"unknown option {option(name)}; {suggest(name, [*also, *used], option)}")
        elif name not in used:
            problems.append(f"{option(name)} has no effect on this command; leave it out (--help lists what it takes)")
        else:
            given[name] = from_text(name, text)
    source = _validate(given, lambda values: Config.model_validate(nest(values)))
    return Source(source.values, source.failed, problems + source.problems)


def _validate(given: dict[str, Any], parse: Any, where: str = "") -> Source:
    """Check each value for itself with pydantic."""
    wrong: dict[str, str] = {}
    try:
        config = parse(given)
    except ValidationError as error:
        for one in error.errors():
            name = ".".join(map(str, one["loc"]))
            wrong.setdefault(name, where + sentence(name, given[name], one, KNOBS[name].annotation))
        config = parse({name: value for name, value in given.items() if name not in wrong})
    values = {name: value for name, value in leaves(config).items() if name in given and name not in wrong}
    return Source(values, set(wrong), list(wrong.values()))


def _choose_length(file: Source, line: Source) -> None:
    """Steps or epochs, not both; the one on the command line takes the place of the other in the file."""
    for source, where in (file, "the config"), (line, "the command line"):
        steps, epochs = source.values.get("train.steps"), source.values.get("train.epochs")
        if steps is not None and epochs:
            source.problems.append(
                f"train.steps {steps} and train.epochs {epochs:g} are both set in {where}; leave one of them out"
            )
            source.failed |= {"train.steps", "train.epochs"}
    if line.values.get("train.epochs"):
        file.values.pop("train.steps", None)
    elif "train.steps" in line.values:
        file.values.pop("train.epochs", None)


def to_toml(config: Config) -> str:
    """`config`, every knob of it, as TOML that `load` reads back to an equal one, if `load` has made it."""
    lines = [f"# The resolved configuration of a run, written by jaxdist {__version__}."]
    values = leaves(config)
    for section in ("", *SECTIONS):
        lines += ["", f"[{section}]"] * (section != "")
        for name in (name for name in values if name.rpartition(".")[0] == section):
            if values[name] is not None and not (name == "train.steps" and config.train.epochs):
                lines.append(f"{name.rpartition('.')[2]} = {_toml(values[name])}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # JSON's strings are TOML's, but for one control character
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
