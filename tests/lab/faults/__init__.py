"""Mistakes in the system, not in what measures it, each of which a claim of the lecture must notice.

The modules make them, and this table says which claim notices which.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from jaxdist.lab import ring
from jaxdist.lab.checks import memory, traffic
from jaxdist.lab.reductions import checks, execute
from jaxdist.lab.slow_networks import server
from jaxdist.parallel.pipeline import schedules, stages
from tests.lab.faults import data, messages, models, pipelines, running, slow_networks, states

CACHES = (
    memory.states,
    traffic.data_parallel_step,
    schedules.make,
    server.run,
    ring.sent,
    checks.gradient_bytes,
    execute.counted,
    stages.Stages.cut,
)
"""Functions that keep what they have found in a system that was whole, or broken."""

Break = Callable[[pytest.MonkeyPatch], None]


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
    Fault("nccl-primitives", messages.every_message_is_halved),
    Fault("nccl-primitives", messages.gradients_are_averaged_and_not_summed),
    Fault("nccl-primitives", messages.weights_come_from_the_next_device),
    Fault("allreduce-one-gpu", messages.every_message_is_sent_twice, exhaustive=True),
    Fault("zero-offload", states.the_optimizer_state_stays_on_the_device),
    Fault("fsdp-largest-layer", states.weights_are_gathered_before_the_step, slow=True),
    Fault("fsdp-shardwise-update", states.updates_are_made_whole, exhaustive=True),
    Fault("adam-share", states.masters_are_in_bfloat16),
    Fault("adam-extra", states.a_third_moment_is_kept),
    Fault("adam-moments", states.the_betas_are_swapped),
    Fault("gpt2-fp16", models.the_mlp_is_four_times_too_wide),
    Fault("gpt3-h100", models.the_mlp_is_four_times_too_wide),
    Fault("backward-twice", models.weights_get_no_gradient),
    Fault("f-and-g", models.mlp_is_not_split),
    Fault("sequence-parallel", models.sums_are_reduced_whole_and_then_cut),
    Fault("fsdp-forward-shapes", models.rows_are_not_split),
    Fault("tip-zero2", states.gradients_are_summed_whole_and_then_cut, exhaustive=True),
    Fault("fsdp-discard", states.gradients_are_summed_whole_and_then_cut, exhaustive=True),
    Fault("fsdp-reduction", states.gradients_are_summed_whole_and_then_cut, exhaustive=True),
    Fault("primitive-uses", states.gradients_are_summed_whole_and_then_cut, exhaustive=True),
    Fault("fsdp-p-over-n", states.every_stage_is_stage_0),
    Fault("ddp-steps", data.every_second_row_is_left_out),
    Fault("ddp-overlap", models.reductions_stay_in_their_turn, slow=True),
    Fault("global-batch", data.every_device_has_all_rows),
    Fault("toy-cross-entropy", models.the_softmax_has_a_wrong_sum),
    Fault("snapshot-epoch", running.a_run_forgets_its_momentum, slow=True),
    Fault("snapshot-epoch", running.a_run_repeats_the_epoch_that_has_ended, slow=True),
    Fault("snapshot-writers", running.every_process_leads),
    Fault("torchrun-env", running.every_process_has_rank_0),
    Fault("deepspeed-config", data.every_second_row_is_left_out),
    Fault("torchrun-world", running.a_node_has_two_tasks),
    Fault("slurm-script", running.a_node_has_two_tasks),
    Fault("fp16-loss-scale", running.an_overflow_leaves_the_scale_as_it_is),
    Fault("fp16-loss-scale", running.an_overflow_is_no_reason_to_skip_a_step),
    Fault("fp16-loss-scale", running.the_loss_is_not_scaled),
    Fault("gpt3-fp16", models.the_mlp_is_four_times_too_wide),
    Fault("gpt3-min-gpus", models.the_mlp_is_four_times_too_wide),
    Fault("gpt2-min-gpus", models.the_mlp_is_four_times_too_wide),
    Fault("resnet50-ps", models.the_bottlenecks_do_not_narrow, exhaustive=True),
    Fault("allreduce-naive", messages.the_first_message_is_halved, {"sizes": (2, 4, 8, 16)}, exhaustive=True),
    Fault("allreduce-direct", messages.the_first_message_is_halved, {"sizes": (2, 4, 8, 16)}, exhaustive=True),
    Fault("allreduce-ring", messages.the_first_message_is_halved, {"sizes": (2, 4, 8, 16)}, exhaustive=True),
    Fault("allreduce-halving", messages.the_first_message_is_halved, {"sizes": (2, 4, 8, 16)}, exhaustive=True),
    Fault("reduce-example", messages.the_first_message_is_halved, exhaustive=True),
    Fault("ps-direction", messages.the_first_message_is_halved, slow=True),
    Fault("pipeline-2x2", states.gradients_are_reduced_twice, exhaustive=True),
    Fault("fsdp-walkthrough", states.gradients_are_summed_whole_and_then_cut),
    Fault("sampler-unique", data.every_row_is_row_0),
    Fault("sampler-unique", data.labels_are_the_tokens_themselves),
    Fault("sampler-unique", data.every_device_has_all_rows),
    Fault("sampler-unique", data.every_epoch_has_the_order_of_the_first),
    Fault("sampler-unique", data.every_seed_has_the_same_order),
    Fault("val-reduce", data.every_row_is_row_0, ONE_DEVICE),
    Fault("val-reduce", data.the_last_partial_batch_is_dropped, ONE_DEVICE),
    Fault("val-reduce", data.padding_counts, ONE_DEVICE),
    Fault("zero-states-4x", states.the_optimizer_is_replicated),
    Fault("zero-states-8x", states.accumulators_are_whole),
    Fault("zero-states-nd", states.the_optimizer_is_replicated, slow=True),
    Fault("zero-states-nd", states.weights_are_gathered_before_the_step, slow=True),
    Fault("zero-7p5b-0", states.stage_0_is_stage_1),
    Fault("zero-7p5b-1", states.the_optimizer_is_replicated),
    Fault("zero-7p5b-2", states.the_optimizer_is_replicated),
    Fault("zero-7p5b-2", states.accumulators_are_whole),
    Fault("zero-7p5b-3", states.the_optimizer_is_replicated),
    Fault("zero-7p5b-3", states.weights_are_gathered_before_the_step),
    Fault("zero-comm-1", states.gradients_are_summed_whole_and_then_cut, slow=True),
    Fault("zero-comm-2", states.gradients_are_summed_whole_and_then_cut, slow=True),
    Fault("zero-comm-3", states.gradients_are_summed_whole_and_then_cut, slow=True),
    Fault("mixed-precision", states.masters_are_in_bfloat16),
    Fault("adam-bias", states.the_updates_are_not_counted),
    Fault("tp-column-row", models.mlp_is_not_split),
    Fault("tp-split", models.mlp_is_not_split),
    Fault("moe-conditional", models.every_queue_has_room_for_all_tokens, {"counts": (4, 32)}, slow=True),
    Fault("cp-ring", models.all_visitors_count_as_earlier, {"ranks": (2,)}, slow=True),
    Fault("cp-ring", models.keys_are_sent_there_and_back, {"ranks": (2,)}, slow=True),
    Fault("pipeline-naive", pipelines.stages_do_not_wait),
    Fault("pipeline-gpipe", pipelines.stages_do_not_wait),
    Fault("pipedream-1f1b", pipelines.a_stage_turns_back_late),
    Fault("pipeline-sends", pipelines.a_message_is_not_needed),
    Fault("pipedream-staleness", pipelines.a_stage_turns_back_late),
    Fault("pipedream-bubble", pipelines.a_batch_enters_in_every_fourth_tick),
    Fault("pipeline-3x4", pipelines.two_slots_are_swapped),
    Fault("vertical-idle", pipelines.stages_do_not_wait),
    Fault("split-31", pipelines.the_last_stage_has_twice_as_many),
    Fault("simple-model-parallel", data.every_second_row_is_left_out),
    Fault("gpt3-3d", pipelines.an_uneven_split_is_not_told),
    Fault("gpt3-3d", pipelines.the_last_stage_has_twice_as_many),
    Fault("strong-scaling", data.every_device_has_all_rows),
    Fault("ps-equal", slow_networks.the_server_adds_up_and_does_not_average),
    Fault("federated-average", slow_networks.nothing_crosses, {"others": ()}),
    Fault("topk-only", slow_networks.half_of_what_waits_is_forgotten, {"steps": 5}),
    Fault("topk-only", slow_networks.twice_as_many_elements_are_sent, {"steps": 5}, slow=True),
    Fault("topk-int8", slow_networks.twice_as_many_of_a_block_are_exact),
    Fault("topk-int8", slow_networks.the_first_of_a_block_count_as_its_largest),
    Fault("topk-int8-loss", slow_networks.scales_are_lost, {"others": ()}, slow=True),
    Fault("dga-delay", slow_networks.the_own_gradient_stays_in, slow=True),
)
