"""Say which form of attention runs over `context`, why, and what either form sends."""

from __future__ import annotations

from collections.abc import Mapping

from jaxdist.config import Config
from jaxdist.mesh import CONTEXT
from jaxdist.mesh.split import Split
from jaxdist.output.units import size


def sentence(config: Config, shape: Mapping[str, int]) -> str:
    """Return in a sentence how a mesh of `shape` attends over `context`; empty where that axis is 1."""
    ranks = shape[CONTEXT]
    if ranks == 1:
        return ""
    choice = Split(config, shape).attention
    names = {"ring": "a ring", "ulysses": "Ulysses"}
    sent = {"ring": choice.ring, "ulysses": choice.ulysses}
    chosen = sent.pop(choice.form)
    ((other, others),) = sent.items()
    if others is None:
        beside = f"{names[other]} is not possible"
    else:
        beside = f"{names[other]} would send {size(others)}"
    own = "" if chosen is None else f"a device sends {size(chosen)} in each layer for each of its tokens, and "
    length = config.model.sequence
    return (
        f"a device has {length // ranks:,} of the {length:,} tokens of a row, and attends by {names[choice.form]}: "
        f"{choice.why}; {own}{beside}"
    )


def json(config: Config, shape: Mapping[str, int]) -> dict[str, object] | None:
    """Return the same as the object that `docs/reference/json.md` describes; None where `context` is 1."""
    if shape[CONTEXT] == 1:
        return None
    choice = Split(config, shape).attention
    sent = {"ring": choice.ring, "ulysses": choice.ulysses}
    return {"attention": choice.form, "why": choice.why, "bytes_per_token_and_layer": sent}
