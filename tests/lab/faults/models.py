"""Mistakes in layers, in how they are split over devices, and in the options that a step is compiled with."""

from __future__ import annotations

import os
from typing import Any

import jax
import pytest

from jaxdist import sharding
from jaxdist.config import ModelConfig
from jaxdist.models import experts, layers, loss, resnet
from jaxdist.parallel import context, tensor
from jaxdist.parallel.experts import Rounds


def the_mlp_is_four_times_too_wide(patch: pytest.MonkeyPatch) -> None:
    init = layers.MLP.__init__

    def wide(self: layers.MLP, config: ModelConfig, *more: Any) -> None:
        init(self, config.model_copy(update={"mlp": 16 * config.embed}), *more)

    patch.setattr(layers.MLP, "__init__", wide)


def the_bottlenecks_do_not_narrow(patch: pytest.MonkeyPatch) -> None:
    """A block's 3x3 convolution has as many channels as what comes out of the block."""
    init = resnet.Bottleneck.__init__

    def wide(self: resnet.Bottleneck, inputs: int, width: int, *more: Any) -> None:
        init(self, inputs, 4 * width, *more)

    patch.setattr(resnet.Bottleneck, "__init__", wide)
    patch.setattr(resnet.Bottleneck, "expansion", 1)


def weights_get_no_gradient(patch: pytest.MonkeyPatch) -> None:
    einsum = tensor.einsum
    patch.setattr(tensor, "einsum", lambda layout, dims, x, w: einsum(layout, dims, x, jax.lax.stop_gradient(w)))


def the_softmax_has_a_wrong_sum(patch: pytest.MonkeyPatch) -> None:
    logits = loss._logits

    def wrong(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        found, log_sum = logits(*arguments)
        return found, log_sum + 1

    patch.setattr(loss, "_logits", wrong)


def mlp_is_not_split(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sharding.RULES, "mlp", ())


def sums_are_reduced_whole_and_then_cut(patch: pytest.MonkeyPatch) -> None:
    """Those that leave a block for a residual stream that is split along the sequence."""
    patch.setattr(sharding.Layout, "sequence_parallel", ())


def rows_are_not_split(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sharding.RULES, "batch", ())


def every_queue_has_room_for_all_tokens(patch: pytest.MonkeyPatch) -> None:
    """The worst case of a router: nothing is left for a further round, and most rows are empty."""

    def worst_case(tokens: int, per_token: int, experts: int, factor: float) -> Rounds:
        return Rounds(tokens, tokens)

    patch.setattr(experts, "rounds_for", worst_case)


def all_visitors_count_as_earlier(patch: pytest.MonkeyPatch) -> None:
    """The first queries of a device meet keys that are later."""
    patch.setattr(context.Ring, "_earlier", lambda self, step: step > 0)


def keys_are_sent_there_and_back(patch: pytest.MonkeyPatch) -> None:
    """Between two devices: each sends them there, back, and there again."""
    onward = context.Ring._onward
    patch.setattr(context.Ring, "_onward", lambda self, x: onward(self, onward(self, onward(self, x))))


def reductions_stay_in_their_turn(patch: pytest.MonkeyPatch) -> None:
    """XLA may not delay a layer's reduction into the next turn of the loop, so that none meets another layer."""
    # The step is compiled in a process of its own, which reads the flag there.
    flag = "--xla_gpu_enable_pipelined_reduce_scatter=false"
    patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {flag}")
