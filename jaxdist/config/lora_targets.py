"""The names of the weights that can have a low-rank adapter, as PEFT calls them."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from jaxdist.config.values import Suggested

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
"""Weights of latent attention, which has `o_proj` too, and `q_proj` where queries have no latent vector."""
TARGETS = (*ATTENTION, *MLP, *LATENT)
"""The weights that can have an adapter. Dropout draws by their places in this order."""

NEVER = {
    "embed_tokens": "the embedding table is looked up, not multiplied",
    "lm_head": "the output projection shares its rows with all ranks of a pipeline",
    "gate": "routers and experts stay as they are",
    "experts": "routers and experts stay as they are",
}
"""Weights that people ask for and that get no adapter, and why."""


def parse(text: str) -> tuple[str, ...]:
    """Return the targets that `text` lists, separated by commas, in the order of `TARGETS`; of "" all.

    Raises `ValueError` for a word that is none.
    """
    words = [word.strip() for word in text.split(",")] if text else list(TARGETS)
    for word in words:
        if word not in TARGETS:
            why = f" ({NEVER[word]})" if word in NEVER else ""
            raise ValueError(f"'{word}' gets no adapter{why}; choose among {', '.join(TARGETS)}")
    return tuple(target for target in TARGETS if target in words)


def _listed(text: str) -> str:
    try:
        parse(text)
    except ValueError as problem:
        raise PydanticCustomError("lora_targets", str(problem)) from None
    return text


LoraTargets = Annotated[str, AfterValidator(_listed), Suggested(TARGETS)]
