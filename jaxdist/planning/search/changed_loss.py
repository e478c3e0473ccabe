"""What makes the replicas wait less and changes the loss: gradient compression, delayed gradients and local steps.

A search never chooses them, since a plan is to have the loss of one device. It prices them where the user asks for
them: in every candidate with replicas. Without replicas nothing would be sent in another way, so that those candidates
are exact.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxdist.config import Config
from jaxdist.mesh import REPLICA
from jaxdist.request.knobs import KNOBS as ALL_KNOBS

KNOBS = {
    "parallel": ("gradient_compression", "compression_density", "compression_rank", "delayed_gradients"),
    "train": ("local_steps",),
    "optimizer": ("outer_rate", "outer_momentum"),
}
"""The knobs that a plan takes as they are given, by their sections."""


def exact(config: Config) -> Config:
    """Return `config` with the loss of one device: all `KNOBS` have their defaults."""
    update = {}
    for section, names in KNOBS.items():
        defaults = {name: ALL_KNOBS[f"{section}.{name}"].default for name in names}
        update[section] = getattr(config, section).model_copy(update=defaults)
    return config.model_copy(update=update)


def given(config: Config) -> str:
    """Return what is asked for, such as `int8 and 10 local steps`; empty where everything is exact."""
    words: list[str] = []
    if config.parallel.gradient_compression != "exact":
        words.append(config.parallel.gradient_compression)
    if config.parallel.delayed_gradients:
        words.append("delayed gradients")
    if config.train.local_steps:
        words.append(f"{config.train.local_steps} local steps")
    return " and ".join(words)


def in_force(config: Config, shape: Mapping[str, int]) -> str:
    """Return what is asked for, where a mesh of `shape` has replicas; empty where the loss is that of one device."""
    return given(config) if shape[REPLICA] > 1 else ""


def sentence(config: Config, shape: Mapping[str, int]) -> str:
    """Return in a sentence that the loss is not that of one device, and why; empty where it is."""
    if not in_force(config, shape):
        return ""
    replicas = shape[REPLICA]
    rule = config.parallel.gradient_compression
    local_steps = config.train.local_steps
    reasons = []
    if local_steps:
        reasons.append(f"its {replicas} replicas part for {local_steps} steps before they average their weights")
    if rule != "exact":
        what = "changes of weights" if local_steps else "gradients"
        reasons.append(f"{what} cross {REPLICA}={replicas} by {rule}, whose rounding depends on mesh and ZeRO stage")
    if config.parallel.delayed_gradients:
        reasons.append("each gradient updates the weights one step late")
    return f"the loss is not that of one device: {', and '.join(reasons)}"
