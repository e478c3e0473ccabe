"""Say which form of attention runs over `context`, why, and what either form sends."""

from __future__ import annotations

from jaxdist.mesh import CONTEXT
from jaxdist.mesh.context import FORMS
from jaxdist.mesh.split import Split
from jaxdist.output.units import size

Row = tuple[str, str]
"""(name, text) of a line."""


def rows(split: Split) -> list[Row]:
    """Return the row of a summary or a report that has the sentence; none where that is empty."""
    attends = sentence(split)
    return [(CONTEXT, attends)] if attends else []


def sentence(split: Split) -> str:
    """Return in a sentence how a mesh attends over `context`; empty where that axis is 1."""
    if split.row_parts == 1:
        return ""
    choice = split.attention
    chosen = choice.sent[choice.form]
    others = choice.sent[choice.other]
    other = FORMS[choice.other].short
    if others is None:
        beside = f"{other} is not possible"
    else:
        beside = f"{other} would send {size(others)}"
    own = "" if chosen is None else f"a device sends {size(chosen)} in each layer for each of its tokens, and "
    return (
        f"a device has {split.length:,} of the {split.config.model.sequence:,} tokens of a row, and attends "
        f"by {choice.traits.short}: {choice.why}; {own}{beside}"
    )


def json(split: Split) -> dict[str, object]:
    """Return the same as the key that `docs/reference/json.md` describes; it is null where `context` is 1."""
    if split.row_parts == 1:
        return {CONTEXT: None}
    choice = split.attention
    sent = dict(choice.sent)
    return {CONTEXT: {"attention": choice.form, "why": choice.why, "bytes_per_token_and_layer": sent}}
