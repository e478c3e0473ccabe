"""Mistakes in the system, not in what measures it, each of which a claim of the lecture must notice."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import P
from jax.sharding import reshard

from jaxdist import launch, sharding
from jaxdist.cluster import process_env, xla_options
from jaxdist.config import ModelConfig
from jaxdist.data import order
from jaxdist.data import rows as data_rows
from jaxdist.data.rows import CutTogether
from jaxdist.lab import phases, ring
from jaxdist.lab.checks import memory, traffic
from jaxdist.lab.reductions import algorithms, checks, execute
from jaxdist.lab.slow_networks import replicas, server, top_k
from jaxdist.mesh import DATA
from jaxdist.models import Params, experts, layers, loss, resnet
from jaxdist.parallel import context, placing, sink, tensor, zero
from jaxdist.parallel.crossing import codes
from jaxdist.parallel.experts import Rounds
from jaxdist.parallel.pipeline import schedules, stages
from jaxdist.parallel.placement import Placement
from jaxdist.parallel.region import vary
from jaxdist.planning import pipelines
from jaxdist.training import run, task, task_text
from jaxdist.training.forward import step
from jaxdist.training.forward.decoder import DecoderForward
from jaxdist.training.forward.loss_scale import LossScale

CACHES = (
    memory.states,
    traffic.elements,
    traffic.kinds_of,
    schedules.make,
    server.run,
    ring.sent,
    checks.gradient_bytes,
    execute.counted,
    stages.Stages.cut,
)
"""Functions that keep what they have found in a system that was whole, or broken."""

Break = Callable[[pytest.MonkeyPatch], None]


def every_row_is_row_0(patch: pytest.MonkeyPatch) -> None:
    windows = CutTogether.windows
    patch.setattr(CutTogether, "windows", lambda self, owners, numbers: windows(self, owners, np.minimum(numbers, 0)))


def labels_are_the_tokens_themselves(patch: pytest.MonkeyPatch) -> None:
    windows = CutTogether.windows

    def repeated(self: CutTogether, owners: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        rows = windows(self, owners, numbers)
        rows[:, 1:] = rows[:, :-1].copy()
        return rows

    patch.setattr(CutTogether, "windows", repeated)


def every_device_has_all_rows(patch: pytest.MonkeyPatch) -> None:
    rules = sharding.rules
    patch.setattr(sharding, "rules", lambda split: {**rules(split), "batch": ()})


def every_epoch_has_the_order_of_the_first(patch: pytest.MonkeyPatch) -> None:
    keys = order._round_keys
    patch.setattr(order, "_round_keys", lambda seed, epoch: keys(seed, 0))


def every_seed_has_the_same_order(patch: pytest.MonkeyPatch) -> None:
    keys = order._round_keys
    patch.setattr(order, "_round_keys", lambda seed, epoch: keys(0, epoch))


def the_last_partial_batch_is_dropped(patch: pytest.MonkeyPatch) -> None:
    held_out_rows = task.held_out_rows
    patch.setattr(task, "held_out_rows", lambda n, batch, limit: held_out_rows(n - n % batch, batch, limit))


def padding_counts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(data_rows, "IGNORED", 0)


def the_optimizer_is_replicated(patch: pytest.MonkeyPatch) -> None:
    build = run.optimizer

    def replicated(*arguments: object) -> optax.GradientTransformation:
        rule = build(*arguments)

        def init(params: Params) -> optax.OptState:
            return rule.init(jax.tree.map(lambda w: reshard(w, P()), params))

        return rule._replace(init=init)

    patch.setattr(run, "optimizer", replicated)


def accumulators_are_whole(patch: pytest.MonkeyPatch) -> None:
    for module, name in ((sink, "zeros"), (zero, "reduced_sums")):
        patch.setattr(module, name, lambda place, shape, dtype: jnp.zeros(shape, dtype))


def weights_are_gathered_before_the_step(patch: pytest.MonkeyPatch) -> None:
    """At stage 3 too."""

    def gathered(self: DecoderForward, params: Params) -> Params:
        return jax.tree.map(lambda p, w: zero.gather(p, w.astype(self.dtype)), self.places, params)

    patch.setattr(DecoderForward, "weights", gathered)


def stage_0_is_stage_1(patch: pytest.MonkeyPatch) -> None:
    placements = placing.placements

    def at_least_1(layout: sharding.Layout, axes: Any, abstract: Any, zero: placing.ZeroOptions, **more: Any) -> Any:
        return placements(layout, axes, abstract, replace(zero, stage=max(zero.stage, 1)), **more)

    patch.setattr(placing, "placements", at_least_1)


def masters_are_in_bfloat16(patch: pytest.MonkeyPatch) -> None:
    init = DecoderForward.init

    def halved(self: DecoderForward, key: jax.Array) -> tuple:
        params, variables = init(self, key)
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16), params), variables

    patch.setattr(DecoderForward, "init", halved)


def gradients_are_summed_whole_and_then_cut(patch: pytest.MonkeyPatch) -> None:
    def all_reduce(place: Placement, g: jax.Array) -> jax.Array:
        size = g.shape[place.shard_dim] // jax.lax.axis_size(DATA)
        start = jax.lax.axis_index(DATA) * size
        return jax.lax.dynamic_slice_in_dim(jax.lax.psum(g, DATA), start, size, place.shard_dim)

    patch.setattr(zero, "_reduce_scatter", all_reduce)


def the_betas_are_swapped(patch: pytest.MonkeyPatch) -> None:
    adamw = optax.adamw
    patch.setattr(optax, "adamw", lambda rate, b1, b2, **more: adamw(rate, b2, b1, **more))


def mlp_is_not_split(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sharding.RULES, "mlp", ())


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
    """Between hosts the step is compiled with the options for one host, with which no reduction meets another layer."""
    within = {one.name: one.value for one in xla_options.OPTIONS[xla_options.series()].within}
    # The step is compiled in a process of its own, which reads them there.
    flags = " ".join(f"--{flag}" for flag in xla_options.as_flags(within).split(", "))
    patch.setenv("XLA_FLAGS", f"{os.environ.get('XLA_FLAGS', '')} {flags}")


def stages_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    """All stages of GPipe run a micro-batch in the same tick."""

    def at_once(S: int, M: int, v: int = 1) -> schedules.Schedule:
        forward = np.zeros((S, 1), int) + np.arange(M)
        return schedules.Schedule("gpipe", S, M, 1, forward, forward + M)

    patch.setitem(schedules.SCHEDULES, "gpipe", at_once)


def a_stage_turns_back_late(patch: pytest.MonkeyPatch) -> None:
    """Rank 0 of PipeDream waits with the backward pass of each micro-batch until it has run one forward pass more."""
    pipedream = schedules.pipedream

    def late(S: int, M: int, v: int = 1) -> schedules.Schedule:
        found = pipedream(S, M, v)
        backward = found.backward.copy()
        backward[0] += 2
        return schedules.Schedule("pipedream", S, M, 1, found.forward, backward)

    patch.setitem(schedules.SCHEDULES, "pipedream", late)


def an_uneven_split_is_not_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipelines, "uneven", lambda config, pipe: "")


def the_server_adds_up_and_does_not_average(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(server, "update", lambda w, gradients: w - 0.1 * sum(gradients))


def nothing_crosses(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(replicas, "mean", lambda x: x)


def half_of_what_waits_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(top_k, "left", lambda x, sent: (x - sent) / 2)


def twice_as_many_elements_are_sent(patch: pytest.MonkeyPatch) -> None:
    largest = top_k.largest
    patch.setattr(top_k, "largest", lambda x, density, form: largest(x, 2 * density, form))


def twice_as_many_of_a_block_are_exact(patch: pytest.MonkeyPatch) -> None:
    largest = codes._largest
    patch.setattr(codes, "_largest", lambda x, count: largest(x, 2 * count))


def the_first_of_a_block_count_as_its_largest(patch: pytest.MonkeyPatch) -> None:
    top_k = jax.lax.top_k
    patch.setattr(jax.lax, "top_k", lambda x, count: top_k(jnp.zeros_like(x), count))


def scales_are_lost(patch: pytest.MonkeyPatch) -> None:
    def without(sent: jax.Array) -> jax.Array:
        return sent[..., : codes.BLOCK].astype(jnp.float32) / 127

    patch.setattr(codes, "_from_int8", without)


def the_own_gradient_stays_in(patch: pytest.MonkeyPatch) -> None:
    """It is counted once by its worker, and once more in the mean that arrives late."""

    def twice(w: jax.Array, g: jax.Array, old: jax.Array, rate: float) -> jax.Array:
        return w - rate * (g + replicas.mean(old))

    patch.setitem(replicas.RULES, "delayed averaging", twice)


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


def the_first_message_is_halved(patch: pytest.MonkeyPatch) -> None:
    """Of all that a node sends in an all-reduce: its numbers, not its length."""
    apart = execute.apart
    # All-reduces run in a process of their own, where a patch of this one does not arrive.
    patch.setattr(execute, "apart", lambda function, *arguments: apart(halved_there, function, *arguments))
    patch.setattr(execute, "_done", {})
    patch.setattr(algorithms.Network, "send", halving(algorithms.Network.send))


def halved_there(function: Callable[..., Any], *arguments: Any) -> Any:
    algorithms.Network.send = halving(algorithms.Network.send)
    return function(*arguments)


def halving(send: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def halved(self: algorithms.Network, message: jax.Array, pairs: Any) -> jax.Array:
        arrives = send(self, message, pairs)
        return arrives if len(self.sent) > 1 else arrives / 2

    return halved


def gradients_are_reduced_twice(patch: pytest.MonkeyPatch) -> None:
    reduce = zero.reduce_manual
    patch.setattr(zero, "reduce_manual", lambda place, g: reduce(place, vary(reduce(place, g), (DATA,))))


def a_message_is_not_needed(patch: pytest.MonkeyPatch) -> None:
    """Stages 0 and 1 of GPipe run a micro-batch in the same tick."""
    gpipe = schedules.gpipe

    def together(S: int, M: int, v: int = 1) -> schedules.Schedule:
        found = gpipe(S, M, v)
        forward = found.forward.copy()
        forward[1] = forward[0]
        return schedules.Schedule("gpipe", S, M, 1, forward, found.backward)

    patch.setitem(schedules.SCHEDULES, "gpipe", together)


def a_batch_enters_in_every_fourth_tick(patch: pytest.MonkeyPatch) -> None:
    """PipeDream has room for one in every second."""

    def slow(S: int, M: int, v: int = 1) -> schedules.Schedule:
        g = np.arange(S)[:, None]
        m = np.arange(M)
        return schedules.Schedule("pipedream", S, M, 1, 4 * m + g, 4 * m + 2 * S - 1 - g)

    patch.setitem(schedules.SCHEDULES, "pipedream", slow)


def two_slots_are_swapped(patch: pytest.MonkeyPatch) -> None:
    """The backward units of the last two micro-batches of GPipe."""
    gpipe = schedules.gpipe

    def swapped(S: int, M: int, v: int = 1) -> schedules.Schedule:
        found = gpipe(S, M, v)
        backward = found.backward.copy()
        backward[:, -2:] = found.backward[:, :-3:-1]
        return schedules.Schedule("gpipe", S, M, 1, found.forward, backward)

    patch.setitem(schedules.SCHEDULES, "gpipe", swapped)


def the_last_stage_has_twice_as_many(patch: pytest.MonkeyPatch) -> None:
    def split(costs: list[int], parts: int, what: str) -> list[int]:
        each = len(costs) // (parts + 1)
        return [each] * (parts - 1) + [len(costs) - each * (parts - 1)]

    patch.setattr(stages, "split", split)


def every_second_row_is_left_out(patch: pytest.MonkeyPatch) -> None:
    available = task_text.TextTask.available
    patch.setattr(task_text.TextTask, "available", lambda self: (available(self)[0] // 2, available(self)[1]))


def a_third_moment_is_kept(patch: pytest.MonkeyPatch) -> None:
    """The largest second moment so far."""
    patch.setattr(optax, "adamw", lambda rate, b1, b2, **more: optax.amsgrad(rate, b1, b2))


def weights_get_no_gradient(patch: pytest.MonkeyPatch) -> None:
    einsum = tensor.einsum
    patch.setattr(tensor, "einsum", lambda layout, dims, x, w: einsum(layout, dims, x, jax.lax.stop_gradient(w)))


def sums_are_reduced_whole_and_then_cut(patch: pytest.MonkeyPatch) -> None:
    """Those that leave a block for a residual stream that is split along the sequence."""
    patch.setattr(sharding.Layout, "sequence_parallel", ())


def rows_are_not_split(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sharding.RULES, "batch", ())


def every_stage_is_stage_0(patch: pytest.MonkeyPatch) -> None:
    placements = placing.placements

    def whole(layout: sharding.Layout, axes: Any, abstract: Any, zero: placing.ZeroOptions, **more: Any) -> Any:
        return placements(layout, axes, abstract, replace(zero, stage=0), **more)

    patch.setattr(placing, "placements", whole)


def the_softmax_has_a_wrong_sum(patch: pytest.MonkeyPatch) -> None:
    logits = loss._logits

    def wrong(*arguments: Any) -> tuple[jax.Array, jax.Array]:
        found, log_sum = logits(*arguments)
        return found, log_sum + 1

    patch.setattr(loss, "_logits", wrong)


def every_batch_is_the_first(patch: pytest.MonkeyPatch) -> None:
    def first(seed: int, step: int, batch: int, n: int) -> np.ndarray:
        return order.global_rows(seed, 0, batch, n)

    patch.setattr(task, "global_rows", first)
    patch.setattr(task_text, "global_rows", first)


def every_process_leads(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(process_env.ProcessEnv, "leader", True)


def every_process_has_rank_0(patch: pytest.MonkeyPatch) -> None:
    number = process_env._number
    patch.setattr(
        process_env, "_number", lambda given, name, *more: 0 if name == "RANK" else number(given, name, *more)
    )


def a_node_has_two_tasks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(launch, "tasks_per_node", lambda asked, gpus: 2)


def an_overflow_changes_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LossScale, "after", lambda self, finite: self)


def sums_leave_out_device_1(patch: pytest.MonkeyPatch) -> None:
    psum = jax.lax.psum
    patch.setattr(jax.lax, "psum", lambda x, axis: psum(jnp.where(jax.lax.axis_index(axis) == 1, 0, x), axis))


def every_message_is_sent_twice(patch: pytest.MonkeyPatch) -> None:
    apart = execute.apart
    patch.setattr(execute, "apart", lambda function, *arguments: apart(sent_twice_there, function, *arguments))


def sent_twice_there(function: Callable[..., Any], *arguments: Any) -> Any:
    send = algorithms.Network.send
    algorithms.Network.send = lambda self, message, pairs: send(self, message, pairs) + send(self, 2 * message, pairs)
    return function(*arguments)


def the_optimizer_state_stays_on_the_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(step, "to_host", lambda tree: tree)


def nothing_is_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(phases.Recorder, "free", lambda self, name, *arrays: self._note(name))


def updates_are_made_whole(patch: pytest.MonkeyPatch) -> None:
    """Each device gathers the whole gradient, and makes the whole update, of which it keeps its shard."""
    build = run.optimizer

    def whole(*arguments: object) -> optax.GradientTransformation:
        rule = build(*arguments)

        def update(grads: Params, *more: Any) -> Any:
            gathered = jax.tree.map(lambda g: reshard(reshard(g, P()), jax.typeof(g).sharding.spec), grads)
            return rule.update(gathered, *more)

        return rule._replace(update=update)

    patch.setattr(run, "optimizer", whole)


@dataclass(frozen=True)
class Fault:
    """A claim, a mistake that it must notice, and the settings with which it is measured."""

    id: str
    system: Break
    settings: dict[str, Any] = field(default_factory=dict)
    slow: bool = False
    """Whether a program is compiled for seconds."""
    exhaustive: bool = False
    """Whether it takes so long that only the exhaustive tier runs it."""

    @property
    def marks(self) -> list[pytest.MarkDecorator]:
        """The marks of its test."""
        return [pytest.mark.exhaustive] * self.exhaustive + [pytest.mark.slow] * self.slow


ONE_DEVICE = {"meshes": ("1x1x1",)}

FAULTS = (
    Fault("nccl-primitives", sums_leave_out_device_1),
    Fault("allreduce-one-gpu", every_message_is_sent_twice, exhaustive=True),
    Fault("zero-offload", the_optimizer_state_stays_on_the_device),
    Fault("fsdp-largest-layer", nothing_is_freed),
    Fault("fsdp-shardwise-update", updates_are_made_whole, exhaustive=True),
    Fault("adam-share", masters_are_in_bfloat16),
    Fault("adam-extra", a_third_moment_is_kept),
    Fault("adam-moments", the_betas_are_swapped),
    Fault("gpt2-fp16", the_mlp_is_four_times_too_wide),
    Fault("gpt3-h100", the_mlp_is_four_times_too_wide),
    Fault("backward-twice", weights_get_no_gradient),
    Fault("f-and-g", mlp_is_not_split),
    Fault("sequence-parallel", sums_are_reduced_whole_and_then_cut),
    Fault("fsdp-forward-shapes", rows_are_not_split),
    Fault("tip-zero2", gradients_are_summed_whole_and_then_cut, exhaustive=True),
    Fault("fsdp-discard", gradients_are_summed_whole_and_then_cut, exhaustive=True),
    Fault("fsdp-reduction", gradients_are_summed_whole_and_then_cut, exhaustive=True),
    Fault("primitive-uses", gradients_are_summed_whole_and_then_cut, exhaustive=True),
    Fault("fsdp-p-over-n", every_stage_is_stage_0),
    Fault("ddp-steps", every_second_row_is_left_out),
    Fault("ddp-overlap", reductions_stay_in_their_turn, slow=True),
    Fault("global-batch", every_device_has_all_rows),
    Fault("toy-cross-entropy", the_softmax_has_a_wrong_sum),
    Fault("snapshot-epoch", every_batch_is_the_first),
    Fault("snapshot-writers", every_process_leads),
    Fault("torchrun-env", every_process_has_rank_0),
    Fault("deepspeed-config", every_second_row_is_left_out),
    Fault("torchrun-world", a_node_has_two_tasks),
    Fault("slurm-script", a_node_has_two_tasks),
    Fault("fp16-loss-scale", an_overflow_changes_nothing),
    Fault("gpt3-fp16", the_mlp_is_four_times_too_wide),
    Fault("gpt3-min-gpus", the_mlp_is_four_times_too_wide),
    Fault("gpt2-min-gpus", the_mlp_is_four_times_too_wide),
    Fault("resnet50-ps", the_bottlenecks_do_not_narrow, exhaustive=True),
    Fault("allreduce-naive", the_first_message_is_halved, {"sizes": (2, 4, 8, 16)}, exhaustive=True),
    Fault("allreduce-direct", the_first_message_is_halved, {"sizes": (2, 4, 8, 16)}, exhaustive=True),
    Fault("allreduce-ring", the_first_message_is_halved, {"sizes": (2, 4, 8, 16)}, exhaustive=True),
    Fault("allreduce-halving", the_first_message_is_halved, {"sizes": (2, 4, 8, 16)}, exhaustive=True),
    Fault("reduce-example", the_first_message_is_halved, exhaustive=True),
    Fault("ps-direction", the_first_message_is_halved, slow=True),
    Fault("pipeline-2x2", gradients_are_reduced_twice, exhaustive=True),
    Fault("fsdp-walkthrough", gradients_are_summed_whole_and_then_cut),
    Fault("sampler-unique", every_row_is_row_0),
    Fault("sampler-unique", labels_are_the_tokens_themselves),
    Fault("sampler-unique", every_device_has_all_rows),
    Fault("sampler-unique", every_epoch_has_the_order_of_the_first),
    Fault("sampler-unique", every_seed_has_the_same_order),
    Fault("val-reduce", every_row_is_row_0, ONE_DEVICE),
    Fault("val-reduce", the_last_partial_batch_is_dropped, ONE_DEVICE),
    Fault("val-reduce", padding_counts, ONE_DEVICE),
    Fault("zero-states-4x", the_optimizer_is_replicated),
    Fault("zero-states-8x", accumulators_are_whole),
    Fault("zero-states-nd", the_optimizer_is_replicated, slow=True),
    Fault("zero-states-nd", weights_are_gathered_before_the_step, slow=True),
    Fault("zero-7p5b-0", stage_0_is_stage_1),
    Fault("zero-7p5b-1", the_optimizer_is_replicated),
    Fault("zero-7p5b-2", the_optimizer_is_replicated),
    Fault("zero-7p5b-2", accumulators_are_whole),
    Fault("zero-7p5b-3", the_optimizer_is_replicated),
    Fault("zero-7p5b-3", weights_are_gathered_before_the_step),
    Fault("zero-comm-1", gradients_are_summed_whole_and_then_cut, slow=True),
    Fault("zero-comm-2", gradients_are_summed_whole_and_then_cut, slow=True),
    Fault("zero-comm-3", gradients_are_summed_whole_and_then_cut, slow=True),
    Fault("mixed-precision", masters_are_in_bfloat16),
    Fault("adam-bias", the_betas_are_swapped),
    Fault("tp-column-row", mlp_is_not_split),
    Fault("tp-split", mlp_is_not_split),
    Fault("moe-conditional", every_queue_has_room_for_all_tokens, {"counts": (4, 32)}, slow=True),
    Fault("cp-ring", all_visitors_count_as_earlier, {"ranks": (2,)}, slow=True),
    Fault("cp-ring", keys_are_sent_there_and_back, {"ranks": (2,)}, slow=True),
    Fault("pipeline-naive", stages_do_not_wait),
    Fault("pipeline-gpipe", stages_do_not_wait),
    Fault("pipedream-1f1b", a_stage_turns_back_late),
    Fault("pipeline-sends", a_message_is_not_needed),
    Fault("pipedream-staleness", a_stage_turns_back_late),
    Fault("pipedream-bubble", a_batch_enters_in_every_fourth_tick),
    Fault("pipeline-3x4", two_slots_are_swapped),
    Fault("vertical-idle", stages_do_not_wait),
    Fault("split-31", the_last_stage_has_twice_as_many),
    Fault("simple-model-parallel", every_second_row_is_left_out),
    Fault("gpt3-3d", an_uneven_split_is_not_told),
    Fault("strong-scaling", every_device_has_all_rows),
    Fault("ps-equal", the_server_adds_up_and_does_not_average),
    Fault("federated-average", nothing_crosses, {"others": ()}),
    Fault("topk-only", half_of_what_waits_is_forgotten, {"steps": 5}),
    Fault("topk-only", twice_as_many_elements_are_sent, {"steps": 5}, slow=True),
    Fault("topk-int8", twice_as_many_of_a_block_are_exact),
    Fault("topk-int8", the_first_of_a_block_count_as_its_largest),
    Fault("topk-int8-loss", scales_are_lost, {"others": ()}, slow=True),
    Fault("dga-delay", the_own_gradient_stays_in, slow=True),
)
