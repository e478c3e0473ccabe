"""Choose the type of transformers that a model has: one home for its `config.json` and for the names of its tensors."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from jaxdist.config import ModelConfig, RequestError
from jaxdist.config.model import OF_ROTARY
from jaxdist.huggingface.families import Family
from jaxdist.huggingface.keys import ModelType
from jaxdist.huggingface.layer_kinds import computes_kinds
from jaxdist.huggingface.model_types import MODEL_TYPES
from jaxdist.huggingface.model_types.shared import ROUTED
from jaxdist.huggingface.rope import computes_rope

RESOLVED = {
    "kv_heads": "key_value_heads",
    "head_dim": "unturned_size",
    "value_dim": "value_size",
    "mlp": "mlp_width",
    "expert_mlp": "expert_size",
    "positions": "position_rows",
    "attention_multiplier": "score_scale",
    "norm": "norm_form",
    "activation": "mlp_activation",
    "gate": "mlp_gate",
}
"""Knobs of `model` whose 0 or auto stands for another value, and the property that has it.

Where all layers have experts, either knob gives their width.
"""


READ_APART = {
    *("head_dim", "kv_heads", "value_dim"),
    *("rope_theta", "rope_scaling", "rotary_fraction", "period", "sliding_theta"),
}
"""Knobs that are sizes, or that `rope.py` and `layer_kinds.py` read and write."""

OF_TYPES = tuple(knob for knob in OF_ROTARY if knob not in READ_APART)
"""Knobs that a type has keys of, or the same value of in all its models."""


def family_of(model: ModelConfig, model_type: str | None = None) -> Family:
    """Return the tensors of `model` in a folder of a `model_type`; None: of the type that an export would write.

    Raises `RequestError` for a family that Hugging Face's form is not known of.
    """
    if model_type not in MODEL_TYPES or MODEL_TYPES[model_type].family != model.family:
        model_type = _nearest(model)
    return MODEL_TYPES[model_type].tensors(model)


# The modules of adapters ask for it one by one.
@lru_cache(maxsize=64)
def _nearest(model: ModelConfig) -> str:
    """Return the type that computes a model, or else, for the names of its weights, the one that is most like it."""
    try:
        return type_for(model)
    except RequestError:
        alike = {name: kind for name, kind in MODEL_TYPES.items() if kind.family == model.family}
    if not alike:
        raise RequestError(
            f"model.family is {model.family}, which has no form of Hugging Face here; "
            f"{', '.join(dict.fromkeys(kind.family for kind in MODEL_TYPES.values()))} have one"
        )
    return min(alike, key=lambda name: len(_differing(alike[name], model)))


def type_for(model: ModelConfig, preferred: str | None = None) -> str:
    """Return the `model_type` that computes a model, the `preferred` one or the first.

    Raises `RequestError` where there is none.
    """
    fitting = [name for name, kind in MODEL_TYPES.items() if _computes(kind, model)]
    if preferred in fitting:
        return preferred
    if not fitting:
        plain = ModelConfig(family=model.family)
        names = dict.fromkeys([*OF_TYPES, "window", *ROUTED, "router_renormalize"])
        values = ", ".join(f"{knob} {getattr(model, knob)}" for knob in names if _differs(model, plain, knob))
        raise RequestError(
            f"no model type of transformers that jaxdist writes computes a model of family {model.family} with {values}"
        )
    return fitting[0]


def _computes(kind: ModelType, model: ModelConfig) -> bool:
    """Return whether a type computes the model, given its family and all that layers may differ in."""
    if kind.family != model.family:
        return False
    if not kind.rotary:
        return True
    knobs = {setting.knob for setting in kind.settings.values()}
    if "head_dim" not in knobs and model.head_size * model.heads != model.embed:
        return False
    if "kv_heads" not in knobs and model.key_value_heads != model.heads:
        return False
    if not computes_kinds(kind, model) or not computes_rope(kind, model):
        return False
    for setting in kind.settings.values():
        if any(getattr(model, knob) != getattr(model, setting.knob) for knob in setting.also):
            return False
        if setting.values and resolved(model, setting.knob) not in setting.values.values():
            return False
    return not _differing(kind, model)


def _differing(kind: ModelType, model: ModelConfig) -> set[str]:
    """Return the knobs that have other values than in all models of a type."""
    wanted = ModelConfig(family=model.family, **kind.implied)
    return {knob for knob in _fixed(kind) if _differs(model, wanted, knob)}


def _fixed(kind: ModelType) -> set[str]:
    """Return the knobs that are the same in all models of a type with rotary positions."""
    # How a run balances its experts does not change what the model computes.
    free = {"balance_rate"}
    for setting in kind.settings.values():
        free |= {setting.knob, *setting.also}
    return {*OF_TYPES, *kind.implied} - READ_APART - free


def _differs(model: ModelConfig, other: ModelConfig, knob: str) -> bool:
    """Return whether a knob has different values in two models."""
    if knob == "attention_multiplier":
        # 0 stands for what follows from the size of a head, which may be another.
        return model.score_scale != (other.attention_multiplier or model.usual_score_scale)
    return bool(resolved(model, knob) != resolved(other, knob))


def resolved(model: ModelConfig, knob: str) -> Any:
    """Return the value of a knob, or what stands in its place."""
    return getattr(model, RESOLVED.get(knob, knob))
