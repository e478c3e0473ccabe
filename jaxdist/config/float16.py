"""float16: the one 16-bit format of GPUs before Ampere (V100, T4), with a range so small that the loss is scaled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxdist.config import Config

KNOBS = (
    "precision",
    *("train.local_steps", "parallel.delayed_gradients", "pipeline.schedule"),
    *("model.family", "model.balance_loss", "model.z_loss", "model.lora_rank", "model.lora_base"),
)
"""What `refused` reads."""


def scales_loss(precision: str) -> bool:
    """Return whether the loss is scaled in the backward pass: in float16 small gradients would be zero."""
    return precision == "float16"


def refused(config: Config) -> Iterator[str]:
    """Yield a sentence for each knob that does not go with a scaled loss; none in other precisions."""
    if not scales_loss(config.precision):
        return
    but = f"precision is {config.precision}, but"
    instead = "or precision to float32"
    if config.train.local_steps:
        yield (
            f"{but} with train.local_steps {config.train.local_steps} each replica would find a scale of the loss of "
            f"its own; set train.local_steps to 0, {instead}"
        )
    if config.parallel.delayed_gradients:
        yield (
            f"{but} with parallel.delayed_gradients the next step is on its way before an overflow is seen; set "
            f"parallel.delayed_gradients to false, {instead}"
        )
    if config.pipeline.asynchronous:
        yield (
            f"{but} pipeline.schedule {config.pipeline.schedule} updates each stage before an overflow in another one "
            f"is seen; set pipeline.schedule to 1f1b, {instead}"
        )
    for name in ("balance_loss", "z_loss"):
        weight = getattr(config.model, name)
        if weight and config.model.traits.routed:
            yield (
                f"{but} model.{name} is {weight:g}, and the losses of routers are not scaled with the cross-entropy; "
                f"set model.{name} to 0, {instead}"
            )
    if config.model.frozen and config.model.lora_base != "float32":
        yield (
            f"{but} with model.lora_base {config.model.lora_base} frozen weights are in bfloat16, whose range float16 "
            f"does not have; set model.lora_base to float32, {instead}"
        )
