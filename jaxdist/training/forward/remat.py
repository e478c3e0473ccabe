"""Activation checkpointing (remat): what the backward pass of a layer recomputes, as `model.remat` asks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from jaxdist.models.attention import is_cudnn_forward
from jaxdist.models.blocked_attention import ATTENTION
from jaxdist.parallel.experts import ROUTING
from jaxdist.parallel.tensor import PRODUCT
from jaxdist.sharding import HOST

INPUT = "input of a layer"
"""Name of a layer's input. It is given inside the layer, because a `scan` does not offload the carry that it is asked
to offload."""

SAVED_NAMES = dict(
    named=(PRODUCT, ATTENTION, ROUTING),
    dots=(PRODUCT, ROUTING),
    block=(ROUTING,),
    stage=(ROUTING,),
    offload=(ROUTING,),
)
"""Activations that the forward pass of a layer saves beside its input, by what it saves (`mesh.split.saved_by_layer`).

`stage` recomputes blocks on a mesh without stages, where a run may continue that had a pipeline before.
"""


Layer = Callable[..., Any]
Wrapper = Callable[[Layer], Layer]
"""Says what the backward pass of a layer recomputes."""


def recompute(saved: str) -> Wrapper:
    """Return a wrapper of a layer's function that saves only these activations."""
    names = SAVED_NAMES[saved]
    policies = jax.checkpoint_policies
    policy = policies.save_only_these_names(*names)
    if ATTENTION in names:
        policy = policies.save_from_both_policies(policy, is_cudnn_forward)
    return partial(jax.checkpoint, prevent_cse=False, policy=policy)


def offload_input(layer: Layer) -> Layer:
    """Return `layer` recomputed from its input in the backward pass; the input waits in the host's memory."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=SAVED_NAMES["offload"],
        names_which_can_be_offloaded=(INPUT,),
        offload_src="device",
        offload_dst=HOST,
    )
    return jax.checkpoint(layer, prevent_cse=False, policy=policy)


def keep_all(layer: Layer) -> Layer:
    """Return `layer` as it is: JAX saves whatever its backward pass needs."""
    return layer
