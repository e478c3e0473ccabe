"""Turn `config.json` into values of `model`, and back. What would change the function and is not known is refused."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from jaxdist.config import ModelConfig, RequestError
from jaxdist.config.rope_scaling import parse
from jaxdist.files.json_schema import is_whole, short
from jaxdist.huggingface.folder import Folder
from jaxdist.huggingface.keys import (
    ADVICE,
    FIRST_WINDOWED,
    LAYERED_WINDOW,
    MODEL_TYPES,
    NEUTRAL,
    NO_EFFECT,
    OFF,
    REASONS,
    ROPE,
    WINDOW,
    ModelType,
    Setting,
)
from jaxdist.huggingface.rope import rope_json, rope_values
from jaxdist.huggingface.schema import CONFIG

OTHER_MODEL = "take another model"

MOST_LAYERS = 2**12
"""Layers of the deepest model that has a list of the windows of its layers."""

FULL = "full_attention"
SLIDING = "sliding_attention"

RESOLVED = {
    "kv_heads": "key_value_heads",
    "head_dim": "head_size",
    "mlp": "split_width",
    "expert_mlp": "expert_size",
    "positions": "position_rows",
}
"""Knobs of `model` whose 0 stands for another value, and the property that has it.

A model with experts has no other MLP, so that either knob gives their width.
"""


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
        values[setting.knob] = value
        keys[setting.knob] = key
        problems += more
    if kind.rotary:
        rope, more = rope_values(config, maximum, kind.theta)
        values.update(rope)
        problems += more
        window, more = _window(config, kind, values["layers"])
        values["window"] = window
        problems += more
        keys.update(rope_theta="rope_theta", window="sliding_window")
    problems += _invalid(values, keys)
    if problems:
        raise RequestError(*(f"{folder.path / CONFIG}: {problem}" for problem in problems))
    model = ModelConfig(**values)
    for setting in kind.settings.values():
        if setting.factor:
            values[setting.knob] *= setting.factor(model)
    return values


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
    name = _type_for(model, model_type)
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
        config[key] = getattr(model, RESOLVED.get(setting.knob, setting.knob))
        if setting.factor:
            config[key] /= setting.factor(model)
    if kind.rotary:
        config.update(rope_json(model.rope_theta, model.rope))
        config.update(_window_json(model, kind))
    return config


def _unknown(config: dict[str, Any], kind: ModelType) -> Iterator[str]:
    """Yield a sentence for each key that is not in the tables."""
    known = NO_EFFECT | {*OFF, *kind.settings, *kind.allowed, kind.maximum}
    known |= {key for key, values in NEUTRAL.items() if config.get(key) in values}
    known |= {*kind.unused, *(setting.other for setting in kind.settings.values())}
    if kind.rotary:
        known |= {*ROPE, *WINDOW}
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
    if len(found) == 2 and found[key] != found[setting.other]:
        both = " and ".join(f"{name} ({short(one)})" for name, one in found.items())
        return value, [f"{both} differ; keep the right one"]
    return value, []


def _not_allowed(config: dict[str, Any], kind: ModelType) -> Iterator[str]:
    """Yield a sentence for each key that has a value other than those computed here."""
    for key, values in {**OFF, **kind.allowed}.items():
        off = config.get(key) is None and not values[0]
        if key in config and config[key] not in values and not off and key not in kind.settings:
            valid = " or ".join(short(value) for value in values)
            yield f"{key} is {short(config[key])}, and only {valid} is computed; {ADVICE.get(key, OTHER_MODEL)}"


def _wrong_architecture(config: dict[str, Any], kind: ModelType) -> Iterator[str]:
    """Yield a sentence where the model is not a decoder of text, such as a classifier."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or any(name not in kind.architectures for name in names):
        yield f"architectures is {short(names)}, and only {kind.architectures[0]} is computed; {OTHER_MODEL}"


def _window(config: dict[str, Any], kind: ModelType, layers: Any) -> tuple[Any, list[str]]:
    """Return the sliding window that all layers have, or 0, and a sentence for each problem."""
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        # `ModelConfig` has a sentence about this number.
        return 0, []
    window = config.get("sliding_window", None if kind.window == "none" else kind.window_default)
    if kind.window == "unused" or (kind.window == "some" and not config.get("use_sliding_window", False)):
        window = None
    if window is not None and kind.window == "none":
        return 0, [f"sliding_window is {short(window)}, which this model_type does not have; {OTHER_MODEL}"]
    if window == 0:
        return 0, ["sliding_window is 0, which hides every token; write null for no window"]
    first: Any = 0
    if kind.window == "some":
        first = config.get("max_window_layers")
        first = FIRST_WINDOWED if first is None else first
    if not isinstance(first, int):
        return 0, [f"max_window_layers is {short(first)}, which must be a whole number"]
    implied = [FULL if window is None or layer < first else SLIDING for layer in range(layers)]
    types = config.get("layer_types")
    if types is None:
        types = implied
    problem = _wrong_types(types, layers, window)
    if not problem and kind.window != "some" and types != implied:
        problem = f"layer_types is {short(types)}, which sliding_window {short(window)} contradicts; {OTHER_MODEL}"
    if problem:
        return 0, [problem]
    return (window if SLIDING in types else 0), []


def _wrong_types(types: Any, layers: int, window: Any) -> str:
    """Return why `layer_types` gives no window that all layers have, or an empty string."""
    shown = short(types)
    if not isinstance(types, list) or len(types) != layers or any(one not in (FULL, SLIDING) for one in types):
        return f"layer_types is {shown}, and only {FULL} or {SLIDING} for each of {layers} layers is computed"
    windowed = types.count(SLIDING)
    if windowed and window is None:
        return f"layer_types is {shown}, but sliding_window (with use_sliding_window) gives no window; {OTHER_MODEL}"
    if 0 < windowed < layers:
        return (
            f"{windowed} of {layers} layers have a sliding window (layer_types, max_window_layers), and all layers "
            f"must have the same; {OTHER_MODEL}"
        )
    return ""


def _window_json(model: ModelConfig, kind: ModelType) -> dict[str, Any]:
    """Return the keys of the sliding window."""
    if kind.window == "none":
        return {}
    window = model.window or None
    if kind.window in ("all", "unused"):
        return {"sliding_window": window}
    layer_type = SLIDING if window else FULL
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0 if window else model.layers,
        "layer_types": [layer_type] * model.layers,
    }


def _type_for(model: ModelConfig, preferred: str | None) -> str:
    """Return the `model_type` that computes a model. Raises `RequestError` where there is none."""
    fitting = [name for name, kind in MODEL_TYPES.items() if _computes(kind, model)]
    if preferred in fitting:
        return preferred
    if not fitting:
        of_family = [kind for kind in MODEL_TYPES.values() if kind.family == model.family]
        knobs = dict.fromkeys(itertools.chain(*map(_fixed, of_family), ["window"]))
        values = ", ".join(f"{knob} {getattr(model, knob)}" for knob in knobs)
        raise RequestError(
            f"no model type of transformers that jaxdist writes computes a model of family {model.family} with {values}"
        )
    return fitting[0]


def _computes(kind: ModelType, model: ModelConfig) -> bool:
    """Return whether a type computes the model, given its family, biases, norms and window."""
    if kind.family != model.family:
        return False
    if not kind.rotary:
        return True
    if model.window and kind.window in ("none", "unused"):
        return False
    if "head_dim" not in kind.settings and model.head_size * model.heads != model.embed:
        return False
    return all(getattr(model, knob) == value for knob, value in _fixed(kind).items())


def _fixed(kind: ModelType) -> dict[str, Any]:
    """Return the knobs, with their values, that are the same in all models of a type with rotary positions."""
    implied = {"qkv_bias": False, "qk_norm": "none", **kind.implied}
    # How a run balances its experts does not change what the model computes.
    free = {"balance_rate", *(setting.knob for setting in kind.settings.values())}
    return {knob: value for knob, value in implied.items() if knob not in free}


def _invalid(values: dict[str, Any], keys: dict[str, str]) -> Iterator[str]:
    """Yield a sentence for each value that its knob does not accept; `keys` gives the key of each knob."""
    try:
        ModelConfig.model_validate(values, strict=True)
    except ValidationError as invalid:
        for error in invalid.errors():
            knob = str(error["loc"][0])
            reason = error["msg"].removeprefix("Input ")
            yield f"{keys.get(knob, knob)} is {short(error['input'])}, which {reason[:1].lower()}{reason[1:]}"
