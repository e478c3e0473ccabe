"""Turn `config.json` into values of `model`, and back. What would change the function and is not known is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from jaxdist.config import ModelConfig, RequestError
from jaxdist.config.rope_scaling import parse
from jaxdist.files.json_schema import is_number, is_whole, short
from jaxdist.huggingface.folder import Folder
from jaxdist.huggingface.keys import (
    ADVICE,
    LAYERED_WINDOW,
    NEUTRAL,
    NO_EFFECT,
    NOPE,
    OFF,
    REASONS,
    ROPE,
    WINDOW,
    ModelType,
    Setting,
)
from jaxdist.huggingface.layer_kinds import OTHER_MODEL, kinds_json, kinds_values
from jaxdist.huggingface.model_types import MODEL_TYPES
from jaxdist.huggingface.rope import rope_json, rope_values
from jaxdist.huggingface.schema import CONFIG
from jaxdist.huggingface.type_choice import RESOLVED, resolved, type_for


def model_values(folder: Folder) -> dict[str, Any]:
    """Return the knobs of `model` that `config.json` determines, such as `{"family": "llama", "layers": 16, ...}`.

    `sequence` is never among them: how long rows are is up to a run. Raises `RequestError` with a sentence for each
    value that is not known or not computed here, by the name of its key.
    """
    kind = model_type_of(folder)
    config = folder.config
    problems = [*_unknown(config, kind), *_not_allowed(config, kind), *_wrong_architecture(config, kind)]
    maximum = maximum_of(folder)
    if not is_whole(maximum, 1):
        problems.append(f"{kind.maximum} is {short(maximum)}, which must be a whole number from 1 to 2^53")
    values: dict[str, Any] = {"family": kind.family, **kind.implied}
    keys: dict[str, str] = {}
    for key, setting in kind.settings.items():
        value, more = _setting(config, key, setting)
        values.update(dict.fromkeys((setting.knob, *setting.also), value))
        keys[setting.knob] = key
        problems += more
    if kind.rotary:
        kinds, more = kinds_values(config, kind, values["layers"])
        values.update(kinds)
        problems += more
        rope, more = rope_values(config, maximum, kind, kinds)
        values.update(rope)
        problems += more
        keys.update(zip(("rope_theta", "rotary_fraction"), kind.rotary_names, strict=True), window="sliding_window")
        keys["sliding_theta"] = kind.sliding_theta_name or "sliding_attention.rope_theta"
    problems += _invalid(values, keys)
    if problems:
        raise RequestError(*(f"{folder.path / CONFIG}: {problem}" for problem in problems))
    model = ModelConfig(**values)
    for key, setting in kind.settings.items():
        if setting.unit:
            values[setting.knob] = _counted(folder, key, values[setting.knob], setting.unit(model))
        if setting.factor:
            values[setting.knob] *= setting.factor(model)
        if setting.power != 1:
            values[setting.knob] **= setting.power
    return values


def _counted(folder: Folder, key: str, value: int, unit: int) -> int:
    """Return how often `unit` is in the value of a key. Raises `RequestError` where the value is no multiple of it."""
    count, rest = divmod(value, unit)
    if rest:
        raise RequestError(
            f"{folder.path / CONFIG}: {key} is {value}, and only a multiple of {unit}, the width of an expert, is "
            f"computed; {OTHER_MODEL}"
        )
    return count


def model_type_of(folder: Folder) -> ModelType:
    """Return the type of the model. Raises `RequestError` for one that cannot be read."""
    name = folder.config.get("model_type")
    if not isinstance(name, str) or name not in MODEL_TYPES:
        problems = [
            f"model_type is {short(name)}, and only {', '.join(sorted(MODEL_TYPES))} can be read; {OTHER_MODEL}",
            *_reasons(folder.config),
        ]
        raise RequestError(*(f"{folder.path / CONFIG}: {problem}" for problem in problems))
    return MODEL_TYPES[name]


def maximum_of(folder: Folder) -> int:
    """Return the longest sequence S that `config.json` names, or the default of its type; `model_values` checks it."""
    kind = model_type_of(folder)
    return folder.config.get(kind.maximum, kind.maximum_default)


def longest_sequence(folder: Folder, values: dict[str, Any]) -> int:
    """Return the longest sequence S that the folder's model is good for; `values` come from `model_values`.

    A scaling of rotary positions covers `factor` times the sequence that it begins with.
    """
    maximum = maximum_of(folder)
    scaling = parse(values.get("rope_scaling", "none"))
    return max(maximum, int(scaling.factor * (scaling.original or maximum)))


def differing(values: dict[str, Any], given: dict[str, Any]) -> Iterator[str]:
    """Yield the names among `given` knobs of `model` whose values differ from a folder's, `values`.

    A value of 0 counts as the one that it stands for.
    """
    theirs = ModelConfig(**values)
    ours = theirs.model_copy(update=given)
    for name in given:
        attribute = RESOLVED.get(name, name)
        if getattr(theirs, attribute) != getattr(ours, attribute):
            yield name


def to_json(model: ModelConfig, *, maximum: int, dtype: str, model_type: str | None = None) -> dict[str, Any]:
    """Return `config.json` for a decoder, with the keys of transformers 4 and 5, without the ids of tokens.

    `maximum` is the longest sequence, `dtype` such as bfloat16 that of the weights. `model_type` is that of the folder
    that a run began with; None: the simplest type that computes the model. Raises `RequestError` where there is none.
    """
    name = type_for(model, model_type)
    kind = MODEL_TYPES[name]
    config: dict[str, Any] = {
        "architectures": [kind.architectures[0]],
        "model_type": name,
        "torch_dtype": dtype,
        "dtype": dtype,
        kind.maximum: maximum,
    }
    config.update((key, values[0]) for key, values in kind.allowed.items())
    for key, setting in kind.settings.items():
        config[key] = setting.theirs(resolved(model, setting.knob))
        if setting.unit:
            config[key] *= setting.unit(model)
        if setting.factor:
            config[key] /= setting.factor(model)
    if kind.rotary:
        config.update(rope_json(model, kind, maximum))
        config.update(kinds_json(model, kind))
    return config


def _unknown(config: dict[str, Any], kind: ModelType) -> Iterator[str]:
    """Yield a sentence for each key that is not in the tables."""
    known = NO_EFFECT | {*OFF, *kind.settings, *kind.allowed, kind.maximum}
    known |= {key for key, values in NEUTRAL.items() if config.get(key) in values}
    known |= {*kind.unused, *(setting.other for setting in kind.settings.values())}
    if kind.rotary:
        known |= {*ROPE, *WINDOW, *kind.rotary_names, kind.sliding_theta_name, *kind.full_every_names}
    if kind.nope_every:
        known |= set(NOPE)
    if kind.window in ("some", "unused"):
        known |= set(LAYERED_WINDOW)
    unknown = {key: value for key, value in config.items() if key not in known}
    yield from _reasons(unknown)
    for key in unknown:
        if key not in REASONS:
            yield (
                f"{key} is {short(config[key])}, and this key is not known, so that it might change what the model "
                f"computes; remove it if it does not, or {OTHER_MODEL}"
            )


def _reasons(config: dict[str, Any]) -> Iterator[str]:
    """Yield a sentence for each key of which `REASONS` says why it is refused."""
    for key, reason in REASONS.items():
        if key in config and config[key] not in NEUTRAL.get(key, ()):
            yield f"{key} is {short(config[key])}, and {reason}; {OTHER_MODEL}"


def _setting(config: dict[str, Any], key: str, setting: Setting) -> tuple[Any, list[str]]:
    """Return the value of a key, by either of its names, and a sentence for each problem."""
    found = {name: config[name] for name in (key, setting.other) if name in config}
    value = next(iter(found.values()), setting.default)
    if value is None:
        value = False if setting.default is False else setting.null
    if setting.values and (not isinstance(value, str | int) or value not in setting.values):
        valid = " or ".join(short(one) for one in setting.values)
        return setting.values[setting.default], [
            f"{key} is {short(value)}, and only {valid} is computed; {OTHER_MODEL}"
        ]
    value = setting.values.get(value, value) if setting.values else value
    if setting.power != 1 and (not is_number(value) or value <= 0):
        return setting.default, [f"{key} is {short(value)}, which must be a number above 0"]
    if len(found) == 2 and found[key] != found[setting.other]:
        both = " and ".join(f"{name} ({short(one)})" for name, one in found.items())
        return value, [f"{both} differ; keep the right one"]
    return value, []


def _not_allowed(config: dict[str, Any], kind: ModelType) -> Iterator[str]:
    """Yield a sentence for each key that has a value other than those computed here."""
    for key, values in {**OFF, **kind.allowed}.items():
        off = config.get(key) is None and not values[0]
        if key == "quantization_config" and _quant_method(config) in kind.quantized:
            continue
        elsewhere = key in {*kind.settings, *kind.unused} or (
            kind.rotary_fraction is not None and key in kind.rotary_names
        )
        if key in config and config[key] not in values and not off and not elsewhere:
            valid = " or ".join(short(value) for value in values)
            yield f"{key} is {short(config[key])}, and only {valid} is computed; {ADVICE.get(key, OTHER_MODEL)}"


def _quant_method(config: dict[str, Any]) -> Any:
    """Return how the weights are quantized; None where nothing says so."""
    found = config.get("quantization_config")
    return found.get("quant_method") if isinstance(found, dict) else None


def _wrong_architecture(config: dict[str, Any], kind: ModelType) -> Iterator[str]:
    """Yield a sentence where the model is not a decoder of text, such as a classifier."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or any(name not in kind.architectures for name in names):
        yield f"architectures is {short(names)}, and only {kind.architectures[0]} is computed; {OTHER_MODEL}"


def _invalid(values: dict[str, Any], keys: dict[str, str]) -> Iterator[str]:
    """Yield a sentence for each value that its knob does not accept; `keys` gives the key of each knob."""
    try:
        ModelConfig.model_validate(values, strict=True)
    except ValidationError as invalid:
        for error in invalid.errors():
            knob = str(error["loc"][0])
            reason = error["msg"].removeprefix("Input ")
            yield f"{keys.get(knob, knob)} is {short(error['input'])}, which {reason[:1].lower()}{reason[1:]}"
