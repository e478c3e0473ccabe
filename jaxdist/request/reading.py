"""Combine a TOML file and the values of the command line into one `Config`; write a `Config` as TOML."""

from __future__ import annotations

import itertools
import json
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jaxdist import __version__
from jaxdist.config import Config, RequestError, leaves, listed, nearest
from jaxdist.config.mixture import MixtureConfig
from jaxdist.config.values import path_error
from jaxdist.data.naming.training_paths import mixture_of
from jaxdist.files import read_toml
from jaxdist.files.reasons import why_closed
from jaxdist.huggingface.folder import other_form
from jaxdist.request import checks, pretrained, unused
from jaxdist.request.knobs import KNOBS, SECTIONS, canonical, from_text, nest, option, sentence, shown, suggest, within
from jaxdist.request.own_runs import is_of_fit, no_config
from jaxdist.weights.named import model_folder

SHIPPED = {path.stem: path for path in sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))}
"""The configs inside the package, by name."""

DEFAULT = "gpt_tiny"
"""The config used when the command line names none."""


DATA = ("data.path", "data.mixture")
"""The knobs that name the data to train on: one source, or several."""


@dataclass
class Given:
    """The contents of a file or a command line: valid values, invalid knobs, and a sentence for each problem."""

    values: dict[str, Any] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    folder: Path | None = None
    """The folder of Hugging Face that stands for the file, if one does."""


def load(config: str | None, overrides: Mapping[str, str], knobs: Collection[str] | None = None) -> Config:
    """Return the configuration that a file, or the shipped config of that name, and the command line give together.

    Without `config` it is the shipped `gpt_tiny`. A folder of Hugging Face, as `config` or as `init_from`, gives the
    model. `overrides` maps dotted names to the text given for them; they
    override the file, which overrides the defaults. `knobs` are the knobs, or their sections, that a command uses; None
    means all. Other knobs may not be overridden, and problems that concern only them are not checked.
    Raises `RequestError` with a sentence for each problem.
    """
    result, problems = read(config, overrides, knobs=knobs)
    if problems:
        raise RequestError(*problems)
    return result


def usual_warmup(steps: int, epochs: float) -> int:
    """Return `optimizer.warmup` when the user does not set it: the default, capped at a fifth of a run of `steps`.

    A run that is given in `epochs` gets the default, since its steps are known only when the data is.
    """
    default = KNOBS["optimizer.warmup"].default
    if epochs:
        return default
    return min(default, steps // 5)


def read(
    config: str | None,
    overrides: Mapping[str, str],
    failed: Iterable[str] = (),
    knobs: Collection[str] | None = None,
    also: Iterable[str] = (),
    run: Path | None = None,
) -> tuple[Config, list[str]]:
    """Return the configuration as `load` does, and the problems; invalid values are replaced by defaults.

    `failed` are knobs that failed on the command line before; `also` are further names that a misspelt name may mean.
    `run` is the folder of the run whose file `config` is, which may have been moved.
    """
    used = list(KNOBS)
    if knobs is not None:
        used = [name for name in KNOBS if within(name, knobs)]
    name, file = _read_config(config)
    line = _read_overrides(overrides, used, also)
    line.failed.update(failed)
    _choose_length(file, line)
    _choose_data(file, line)
    if _is_shipped(config) and {**file.values, **line.values}.get("model.lora_rank"):
        # The batch of a shipped configuration is for training anew, and larger than adapters need or a device holds.
        file.values.pop("train.global_batch_size", None)
    values = {**file.values, **line.values}
    # What the configuration of a run sets had an effect there, and a command may use another mesh.
    given = set(line.values if run else values)
    if values.get("run_dir") is None:
        own = pretrained.default_run_dir(values.get("init_from")) if config is None else None
        values["run_dir"] = own or pretrained.RUNS / name
    if "optimizer.warmup" not in values:
        steps = values.get("train.steps", KNOBS["train.steps"].default)
        values["optimizer.warmup"] = usual_warmup(steps, values.get("train.epochs", 0.0))
    # A valid value on the command line replaces an invalid one in the file.
    invalid = (file.failed - set(line.values)) | line.failed
    problems = file.problems + line.problems
    by_folder = file.folder is not None
    if by_folder and values["init_from"] != file.folder:
        problems.append(f"'{config}' and init_from '{values['init_from']}' both give a model; leave one of them out")
    folder = model_folder(values.get("init_from"), run or values["run_dir"])
    if folder:
        given -= pretrained.GIVEN
        more = _complete(values, folder, by_folder or "init_from" in used, "data.tokenizer" in used)
        if more:
            problems += more
            invalid |= {*pretrained.MODEL_KNOBS, "data.tokenizer"}
    result = Config.model_validate(nest(values))
    return result, problems + found_in(result, set(used) - invalid, given, set(line.values))


def batch_note(config: str | None, result: Config, overrides: Mapping[str, str]) -> str:
    """Return a sentence where the batch of a shipped configuration is not taken for adapters; else nothing."""
    name = "train.global_batch_size"
    if not _is_shipped(config) or name in overrides or not result.model.frozen:
        return ""
    shipped, source = _read_config(config)
    theirs = source.values.get(name)
    rows = result.train.global_batch_size
    if theirs in (None, rows):
        return ""
    return f"{name} is {rows}, because that of {shipped}, {theirs}, is for training anew and not for adapters"


def found_in(
    config: Config, good: Collection[str], given: Collection[str] = tuple(KNOBS), own: Collection[str] = tuple(KNOBS)
) -> list[str]:
    """Return a sentence for each problem that concerns only the `good` knobs.

    A knob without an effect is reported once. The other checks see the request as it is without that knob. `given` and
    `own` is described at `unused.refusals`.
    """
    idle = unused.refusals(config, given, own, good)
    if idle:
        values = {name: value for name, value in leaves(config).items() if name not in idle}
        config = Config.model_validate(nest(values))
    return [*idle.values(), *checks.problems(config, good)]


def _complete(values: dict[str, Any], folder: Path, model: bool, tokenizer: bool) -> list[str]:
    """Add to `values` what the `folder` of Hugging Face that a request begins with gives: its model and its tokenizer.

    `model` and `tokenizer` are whether the command uses these. Returns a sentence for each problem.
    """
    problems: list[str] = []
    if model:
        found, problems = pretrained.model_of(folder, values)
        values.update(found)
    if model or tokenizer:
        values.update(pretrained.with_tokenizer(folder, values, default=model))
    return problems


def _is_shipped(config: str | None) -> bool:
    """Return whether this is the name of a shipped config."""
    return config is None or canonical(config) in SHIPPED


def _read_config(config: str | None) -> tuple[str, Given]:
    """Return the name of the config, and the contents of its file."""
    if config is None:
        config = DEFAULT
    if _is_shipped(config):
        shipped = SHIPPED[canonical(config)]
        return shipped.stem, _read_file(shipped)
    path = Path(config)
    if not config:
        problem = "config is empty; name a TOML file or a shipped config, or leave it out"
    elif path_error(path):
        problem = f"config {shown(config)} {path_error(path)}"
    elif model_folder(path):
        return pretrained.name_of(path), Given({"init_from": path}, folder=path)
    elif other_form(path):
        problem = other_form(path)
    elif is_of_fit(path):
        problem = no_config(path, "this command")
    elif os.path.isdir(path) and why_closed(path):
        problem = f"config '{config}' {why_closed(path)}"
    elif os.path.isdir(path):
        problem = f"config '{config}' is a folder; name a TOML file in it, such as {path / 'config.toml'}"
    elif not os.path.exists(path) and (len(path.parts) > 1 or path.suffix == ".toml"):
        problem = f"config '{config}' does not exist; name a TOML file, or a shipped config, such as {DEFAULT}"
    elif not os.path.exists(path):
        problem = f"config '{config}' is neither a file nor a shipped config; {nearest(canonical(config), SHIPPED)}"
    else:
        return path.stem, _read_file(path)
    return DEFAULT, Given(failed=set(KNOBS), problems=[problem])


def _read_file(path: Path) -> Given:
    try:
        tables = read_toml(path)
    except ValueError as error:
        # It is not TOML, not UTF-8, or contains a number of thousands of digits.
        data = "" if str(path).endswith(".toml") else f"; if it holds data, write --data.path {shlex.quote(str(path))}"
        return Given(failed=set(KNOBS), problems=[f"config {path} is not valid TOML: {error}{data}"])
    except OSError as error:
        return Given(failed=set(KNOBS), problems=[f"config {path} cannot be read: {error.strerror or error}"])
    given, problems = _flatten(tables, path)
    source = _validate(given, _parse_strictly, where=f"{path}: ")
    return Given(source.values, source.failed, problems + source.problems)


def _parse_strictly(values: dict[str, Any]) -> Config:
    """Validate the values of a file, where "4" is not a number and 1 is not true."""
    # As JSON, because only there does pydantic's strict mode turn text into a path.
    return Config.model_validate_json(json.dumps(nest(values), default=str), strict=True)


def _parse(values: dict[str, Any]) -> Config:
    """Validate the values of the command line, which are all text."""
    return Config.model_validate(nest(values))


def _flatten(tables: dict[str, Any], path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of a file by dotted name, and a sentence for each that does not exist or is set twice."""
    given: dict[str, Any] = {}
    problems: list[str] = []
    unknown: list[tuple[str, bool]] = []

    def walk(table: dict[str, Any], prefix: str) -> None:
        for key, value in table.items():
            name = prefix + canonical(key)
            if name in SECTIONS and isinstance(value, dict):
                walk(value, name + ".")
            elif name in given:
                problems.append(f"{path}: {name} is set twice, with hyphens and with underscores; keep one")
            elif name in KNOBS:
                given[name] = value
            else:
                unknown.append((prefix + key, isinstance(value, dict)))

    def sentence_about(name: str, section: bool) -> str:
        if section:
            return f"{path}: unknown section '{name}'; {nearest(canonical(name), SECTIONS)}"
        return f"{path}: unknown key '{name}'; {suggest(canonical(name), KNOBS)}"

    walk(tables, "")
    problems += listed(itertools.starmap(sentence_about, unknown), len(unknown), f"unknown keys in {path}")
    return given, problems


def _read_overrides(overrides: Mapping[str, str], used: Collection[str], also: Iterable[str]) -> Given:
    """Return the values of the command line; only `used` knobs are valid, `also` are other names to suggest."""
    given: dict[str, Any] = {}
    problems: list[str] = []
    unknown: list[str] = []
    for name, text in overrides.items():
        name = canonical(name)
        if name not in KNOBS:
            unknown.append(name)
        elif name not in used:
            problems.append(f"{option(name)} has no effect on this command; leave it out (--help lists what it takes)")
        else:
            given[name] = from_text(name, text)
    sentences = (f"unknown option {option(name)}; {suggest(name, [*also, *used], option)}" for name in unknown)
    problems += listed(sentences, len(unknown), "unknown options")
    source = _validate(given, _parse)
    return Given(source.values, source.failed, problems + source.problems)


def _validate(given: dict[str, Any], parse: Callable[[dict[str, Any]], Config], where: str = "") -> Given:
    """Check each value on its own with pydantic; `where` stands in front of each problem."""
    problems: dict[str, str] = {}
    try:
        config = parse(given)
    except ValidationError as invalid:
        for error in invalid.errors():
            name = ".".join(str(part) for part in error["loc"])
            # The first error of a knob is enough.
            problems.setdefault(name, where + sentence(name, given[name], error, KNOBS[name].annotation))
        config = parse({name: value for name, value in given.items() if name not in problems})
    values = {name: value for name, value in leaves(config).items() if name in given and name not in problems}
    return Given(values, set(problems), list(problems.values()))


def _choose_length(file: Given, line: Given) -> None:
    """Refuse steps and epochs from one source; the one on the command line replaces the other in the file."""
    for source, where in ((file, "the config"), (line, "the command line")):
        steps = source.values.get("train.steps")
        epochs = source.values.get("train.epochs")
        if steps is not None and epochs:
            source.problems.append(
                f"train.steps {steps} and train.epochs {epochs:g} are both set in {where}; leave one of them out"
            )
            source.failed.update({"train.steps", "train.epochs"})
    if line.values.get("train.epochs"):
        file.values.pop("train.steps", None)
    elif "train.steps" in line.values:
        file.values.pop("train.epochs", None)


def _choose_data(file: Given, line: Given) -> None:
    """Make a mixture of a data.path with weights; the data of the command line replace those of the file.

    Data and a mixture from one source are refused.
    """
    for source, where in ((file, "the config"), (line, "the command line")):
        path = source.values.get("data.path")
        if path is None:
            continue
        if source.values.get("data.mixture"):
            source.problems.append(f"data.path and data.mixture are both set in {where}; leave one of them out")
            source.failed.update(DATA)
            continue
        try:
            mixture = mixture_of(path)
        except ValueError as error:
            source.problems.append(f"data.path is '{path}': {error}")
            source.failed.add("data.path")
            continue
        if mixture:
            del source.values["data.path"]
            source.values["data.mixture"] = mixture
    if any(name in line.values for name in DATA):
        for name in DATA:
            file.values.pop(name, None)


def to_toml(config: Config) -> str:
    """Return every knob of `config` as TOML. `load` reads it back as an equal config, if `load` has made this one."""
    lines = [f"# The resolved configuration of a run, written by jaxdist {__version__}."]
    for section in ("", *SECTIONS):
        if section:
            lines += ["", f"[{section}]"]
        for name, value in leaves(config).items():
            knob_section, _, knob = name.rpartition(".")
            # A file may not set both steps and epochs, and steps are unused if there are epochs.
            replaced = name == "train.steps" and config.train.epochs
            if knob_section == section and value is not None and not replaced:
                lines.append(f"{knob} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, MixtureConfig):
        return value.toml()
    # A JSON string is a TOML string too, except for one control character.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
