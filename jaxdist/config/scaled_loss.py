"""What a loss that is scaled in the backward pass, as that of float16 is, does not go with."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config, RequestError

KNOBS = (
    "precision",
    *("train.local_steps", "parallel.delayed_gradients", "pipeline.schedule"),
    *("model.family", "model.balance_loss", "model.z_loss", "model.lora_rank", "model.lora_base"),
)
"""What `refused` reads."""


def refused(config: Config) -> Iterator[str]:
    """Yield a sentence for each knob that does not go with a scaled loss; none where it is not scaled."""
    if not config.numbers.scales_loss:
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


def check(config: Config) -> None:
    """Raise `RequestError` for what `refused` finds: the precision may have been `auto` when the request was read."""
    problems = tuple(refused(config))
    if problems:
        raise RequestError(*problems)
