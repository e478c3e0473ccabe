"""Read and write what layers of a type differ in: `layer_types` and other keys become `window` and `period`.

Layers are listed one by one in `config.json`; here the shortest period that repeats to them is kept.
"""

from __future__ import annotations

from typing import Any

from jaxdist.config import ModelConfig, periods
from jaxdist.files.json_schema import is_whole, short
from jaxdist.huggingface.keys import FIRST_WINDOWED, ModelType

OTHER_MODEL = "take another model"

MOST_LAYERS = 2**12
"""Layers of the deepest model that has a list of its layers."""

FULL = "full_attention"
SLIDING = "sliding_attention"


def kinds_values(config: dict[str, Any], kind: ModelType, layers: Any) -> tuple[dict[str, Any], list[str]]:
    """Return `window` and `period` of `model`, and a sentence for each problem."""
    values = {"window": 0, "period": ""}
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        # `ModelConfig` has a sentence about this number.
        return values, []
    turns, problem = _turning(config, kind, layers)
    if problem:
        return values, [problem]
    window, slides, problem = _sliding(config, kind, turns)
    if problem:
        return values, [problem]
    if not any(slides):
        window = 0
    period = periods.shortest([periods.name_of(*both) for both in zip(slides, turns, strict=True)])
    if len(period) > periods.LONGEST:
        return values, [
            f"the kinds of the {layers} layers (layer_types, max_window_layers, no_rope_layers) repeat after "
            f"{len(period)} layers, and at most {periods.LONGEST} can differ; {OTHER_MODEL}"
        ]
    alike = period in (("sliding",), ("full",))
    return {"window": window, "period": "" if alike else ",".join(period)}, []


def kinds_json(model: ModelConfig, kind: ModelType) -> dict[str, Any]:
    """Return the keys of what layers differ in."""
    both = parts_of_layers(model)
    found: dict[str, Any] = {}
    if kind.nope_every:
        turns = [turns for _, turns in both]
        found["no_rope_layers"] = [int(one) for one in turns]
        # It has no effect beside the list.
        found["no_rope_layer_interval"] = kind.nope_every if all(turns) else 1 + turns.index(False)
    if kind.window == "none":
        return found
    window = model.window or None
    found["sliding_window"] = window
    if kind.window in ("all", "unused"):
        return found
    slides = [slides for slides, _ in both]
    found["layer_types"] = [SLIDING if one else FULL for one in slides]
    if kind.window == "some":
        found["use_sliding_window"] = window is not None
        found["max_window_layers"] = slides.index(True) if any(slides) else model.layers
    return found


def computes_kinds(kind: ModelType, model: ModelConfig) -> bool:
    """Return whether a type has layers of the kinds that the model has."""
    both = parts_of_layers(model)
    slides = {slides for slides, _ in both}
    if not kind.nope_every and not all(turns for _, turns in both):
        return False
    if True in slides and kind.window in ("none", "unused"):
        return False
    return not (len(slides) == 2 and kind.window == "all")


def parts_of_layers(model: ModelConfig) -> list[tuple[bool, bool]]:
    """Return, for each layer, whether it has a window, and whether it has rotary positions."""
    names = model.traits.period
    parts = [periods.parts_of(names[i % len(names)]) for i in range(model.layers)]
    return [(slides and model.window > 0, turns) for slides, turns in parts]


def _turning(config: dict[str, Any], kind: ModelType, layers: int) -> tuple[list[bool], str]:
    """Return whether each layer has rotary positions, and what is wrong with the keys of it, or an empty string."""
    every = [True] * layers
    if not kind.nope_every:
        return every, ""
    interval = config.get("no_rope_layer_interval", kind.nope_every)
    if not is_whole(interval, 1):
        return every, f"no_rope_layer_interval is {short(interval)}, which must be a whole number from 1 on"
    listed = config.get("no_rope_layers")
    if listed is None:
        return [(layer + 1) % interval != 0 for layer in range(layers)], ""
    if not isinstance(listed, list) or len(listed) < layers or any(one not in (0, 1) for one in listed):
        return every, f"no_rope_layers is {short(listed)}, which must be 1 (with RoPE) or 0 for each of {layers} layers"
    return [bool(one) for one in listed[:layers]], ""


def _sliding(config: dict[str, Any], kind: ModelType, turns: list[bool]) -> tuple[int, list[bool], str]:
    """Return the window, whether each layer has it, and what is wrong with the keys of it, or an empty string."""
    layers = len(turns)
    none = [False] * layers
    window = config.get("sliding_window", None if kind.window == "none" else kind.window_default)
    if kind.window == "unused" or (kind.window == "some" and not config.get("use_sliding_window", False)):
        window = None
    if window is not None and kind.window == "none":
        return 0, none, f"sliding_window is {short(window)}, which this model_type does not have; {OTHER_MODEL}"
    if window == 0:
        return 0, none, "sliding_window is 0, which hides every token; write null for no window"
    implied, problem = _implied(config, kind, turns)
    if problem:
        return 0, none, problem
    if window is None:
        implied = none
    types = config.get("layer_types")
    if types is None:
        return window or 0, implied, ""
    shown = short(types)
    if not isinstance(types, list) or len(types) != layers or any(one not in (FULL, SLIDING) for one in types):
        return 0, none, f"layer_types is {shown}, and only {FULL} or {SLIDING} for each of {layers} layers is computed"
    slides = [one == SLIDING for one in types]
    if any(slides) and window is None:
        why = f"layer_types is {shown}, but sliding_window (with use_sliding_window) gives no window; {OTHER_MODEL}"
        return 0, none, why
    if kind.window not in ("some", "listed") and slides != implied:
        return 0, none, f"layer_types is {shown}, which sliding_window {short(window)} contradicts; {OTHER_MODEL}"
    return window or 0, slides, ""


def _implied(config: dict[str, Any], kind: ModelType, turns: list[bool]) -> tuple[list[bool], str]:
    """Return which layers have the window where `layer_types` is absent, and what is wrong with the keys of it."""
    layers = range(len(turns))
    if kind.window == "listed":
        every = next((config[name] for name in kind.full_every_names if name in config), kind.full_every)
        if not is_whole(every, 1):
            return list(turns), f"{kind.full_every_names[0]} is {short(every)}, which must be a whole number from 1 on"
        return [(layer + 1) % every != 0 for layer in layers], ""
    if kind.window != "some":
        return [True] * len(turns), ""
    first = config.get("max_window_layers")
    first = FIRST_WINDOWED if first is None else first
    if not isinstance(first, int):
        return list(turns), f"max_window_layers is {short(first)}, which must be a whole number"
    if kind.nope_every:
        # The window stands in the place of rotary positions.
        return [not one for one in turns], ""
    return [layer >= first for layer in layers], ""
