"""Say how large a model is, and how the axes of a mesh split its work: rows of a run's summary and a step's report.

Of a model with experts, they also say what part of it a token goes through, and what its capacity adds.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxdist.config import ModelConfig
from jaxdist.config.trained import all_trained_beside
from jaxdist.mesh import CONTEXT, EXPERT, PIPELINE
from jaxdist.mesh.context import FORMS
from jaxdist.mesh.split import Split
from jaxdist.models import Model, active_parameters, parameters
from jaxdist.models.foreign import Foreign
from jaxdist.output.units import size
from jaxdist.planning import pipelines
from jaxdist.planning.communication import purpose
from jaxdist.planning.expert_rows import first_round, padding
from jaxdist.planning.predicted_collectives import Transfer
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.planning.timing import flops_of_padding, flops_per_token, in_window

Row = tuple[str, str]
"""(name, text) of a line."""


def of_model(split: Split, model: Model | Foreign) -> list[Row]:
    """Return what is said of a model before it runs."""
    size_row = ("model", model_size(split.config.model, model))
    return [size_row, *(("experts", sentence) for sentence in experts(split))]


def of_step(split: Split, model: Model | Foreign, transfers: Iterable[Transfer]) -> list[Row]:
    """Return what is said of the model of a compiled step, for which `transfers` are predicted."""
    m = split.config.model
    (name, text), *rows = of_model(split, model)
    found = [(name, text + in_window(m)), *rows]
    if m.traits.routed:
        sent = exchanged(transfers)
        found += [("experts", sent)] if sent else []
        found.append(("arithmetic", arithmetic(split)))
    return found


def of_axes(sharded: ShardedModel) -> list[Row]:
    """Return what is said of the axes that split rows of tokens and layers."""
    sentence = attends(sharded.split)
    rows = [(CONTEXT, sentence)] if sentence else []
    if sharded.pipe:
        rows.append((PIPELINE, pipelines.describe(sharded.pipe)))
    return rows


def model_size(config: ModelConfig, model: Model | Foreign) -> str:
    """Return the number of parameters, those that a token goes through if not all, and those that are trained."""
    count = parameters(model)
    text = f"{count:,} parameters"
    active = active_parameters(model, config) if isinstance(model, Model) else count
    if active < count:
        text += f", {active:,} of them active for a token"
    if config.frozen:
        beside = all_trained_beside(config)
        text += (
            f"; LoRA of rank {config.lora_rank} trains {beside:,} of them ({beside / count:.2%}), beside a base in "
            f"{config.lora_base}"
        )
    return text


def experts(split: Split) -> list[str]:
    """Return sentences about the experts of a step: where they are, and what padding costs; none without experts."""
    m = split.config.model
    if not m.traits.routed:
        return []
    shared = f" and {m.shared_experts} shared by all" if m.shared_experts else ""
    held = m.experts // split.size(EXPERT)
    where = f", {held} of them on each device" if held < m.experts else ""
    tokens = split.tokens
    wanted = tokens * m.experts_per_token
    return [
        f"{m.experts} in each layer{where}; a token goes through {m.experts_per_token}{shared}",
        f"a micro-batch of {tokens:,} tokens on a device asks for {wanted:,} rows; the first round computes "
        f"{first_round(m, tokens):,} ({padding(m, tokens):.3g} times as many), and longer queues take further rounds",
    ]


def arithmetic(split: Split) -> str:
    """Return the FLOPs of a token that count for MFU, and those that the padding of the first round adds."""
    m = split.config.model
    useful = flops_per_token(m)
    padded = useful + flops_of_padding(m, padding(m, split.tokens))
    return f"{useful:,} FLOPs per token, which MFU counts; {padded:,} with the padding of the first round"


def exchanged(transfers: Iterable[Transfer]) -> str:
    """Return what a device sends in a step to experts of others and back; empty where all are its own."""
    sent = sum(one.wire_bytes for one in transfers if purpose(one) == EXPERT)
    return f"a device sends {size(sent)} per step to experts of other devices and back" if sent else ""


def attends(split: Split) -> str:
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


def context_json(split: Split) -> dict[str, object]:
    """Return the same as the key that `docs/reference/json.md` describes; it is null where `context` is 1."""
    if split.row_parts == 1:
        return {CONTEXT: None}
    choice = split.attention
    sent = dict(choice.sent)
    return {CONTEXT: {"attention": choice.form, "why": choice.why, "bytes_per_token_and_layer": sent}}
