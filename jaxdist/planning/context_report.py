"""Say which form of attention runs over `context`, why, and what either form sends."""

from __future__ import annotations

from jaxdist.mesh import CONTEXT
from jaxdist.mesh.split import Split
from jaxdist.output.units import size


def sentence(split: Split) -> str:
    """Return in a sentence how a mesh attends over `context`; empty where that axis is 1."""
    if split.size(CONTEXT) == 1:
        return ""
    choice = split.attention
    names = {"ring": "a ring", "ulysses": "Ulysses"}
    sent = {"ring": choice.ring, "ulysses": choice.ulysses}
    chosen = sent.pop(choice.form)
    ((other, others),) = sent.items()
    if others is None:
        beside = f"{names[other]} is not possible"
    else:
        beside = f"{names[other]} would send {size(others)}"
    own = "" if chosen is None else f"a device sends {size(chosen)} in each layer for each of its tokens, and "
    return (
        f"a device has {split.length:,} of the {split.config.model.sequence:,} tokens of a row, and attends "
        f"by {names[choice.form]}: {choice.why}; {own}{beside}"
    )


def json(split: Split) -> dict[str, object] | None:
    """Return the same as the object that `docs/reference/json.md` describes; None where `context` is 1."""
    if split.size(CONTEXT) == 1:
        return None
    choice = split.attention
    sent = {"ring": choice.ring, "ulysses": choice.ulysses}
    return {"attention": choice.form, "why": choice.why, "bytes_per_token_and_layer": sent}
