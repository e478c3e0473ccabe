"""Check the length of the run, the batches that it leaves out, spikes, the schedule, and the steps to profile."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config, spikes
from jaxdist.config.left_out import RANGE, batches_until, problem_of, ranges_of
from jaxdist.output.units import remedy
from jaxdist.request.checks.registry import check
from jaxdist.request.knobs import shown


@check("train.steps", "train.epochs")
def _length(config: Config) -> Iterator[str]:
    if not config.train.steps and not config.train.epochs:
        yield "train.steps and train.epochs are both 0, which trains nothing; set one of them"


@check("train.steps", "train.epochs", "optimizer.warmup")
def _warmup(config: Config) -> Iterator[str]:
    steps = config.train.steps
    warmup = config.optimizer.warmup
    if not config.train.epochs and 0 < steps < warmup:
        yield f"optimizer.warmup {warmup} is more than train.steps {steps}; set it to {steps} or less, or train longer"


@check("train.steps", "train.epochs", "optimizer.warmup", "optimizer.schedule", "optimizer.decay_fraction")
def _phases(config: Config) -> Iterator[str]:
    steps = config.train.steps
    rule = config.optimizer
    decay = round(steps * rule.decay_fraction)
    if rule.open_ended and not config.train.epochs and rule.warmup <= steps < rule.warmup + decay:
        yield (
            f"optimizer.warmup {rule.warmup} and the decay of optimizer.decay_fraction {rule.decay_fraction} x "
            f"train.steps {steps} = {decay} are longer than the run; lower one of them"
        )


@check("optimizer.learning_rate", "optimizer.final")
def _last_rate(config: Config) -> Iterator[str]:
    rate = config.optimizer.learning_rate
    final = config.optimizer.final
    # Each of them fits float32 (the types of the knobs see to that), but their product may not.
    if rate * final > 3.4e38:
        yield (
            f"optimizer.learning_rate {rate:g} x optimizer.final {final:g}, the learning rate at the end, becomes "
            "infinity in float32; lower optimizer.final"
        )


@check("optimizer.name", "model.family", "model.lora_rank", "pipeline.schedule")
def _whole_matrices(config: Config) -> Iterator[str]:
    rule = config.optimizer
    if rule.rule.matrices is None:
        return
    but = f"optimizer.name is {rule.name}, which reads whole matrices of the layers, but"
    if config.model.images:
        yield f"{but} model.family {config.model.family} describes none; set optimizer.name to adamw"
    elif config.model.frozen:
        yield f"{but} {config.model.frozen_by} freezes them; set optimizer.name to adamw"
    if config.pipeline.asynchronous:
        yield (
            f"{but} pipeline.schedule {config.pipeline.schedule} updates a stage inside of its pipeline, where no "
            "device gets any; "
        ) + remedy("optimizer.name to adamw", "pipeline.schedule to 1f1b")


@check("optimizer.name", "pipeline.schedule")
def _means_of_wholes(config: Config) -> Iterator[str]:
    name = config.optimizer.name
    if config.optimizer.rule.means is not None and config.pipeline.asynchronous:
        yield (
            f"optimizer.name is {name}, which takes means over whole parameters, but pipeline.schedule "
            f"{config.pipeline.schedule} updates a stage inside of its pipeline, where a device has parts; "
        ) + remedy("optimizer.name to adamw", "pipeline.schedule to 1f1b")


@check("optimizer.moments", "train.local_steps")
def _codes_of_replicas(config: Config) -> Iterator[str]:
    steps = config.train.local_steps
    if steps and config.optimizer.moments == "int8":
        yield (
            f"optimizer.moments is int8, whose codes have no mean for another number of replicas, and "
            f"train.local_steps is {steps}; set optimizer.moments to bfloat16, or train.local_steps to 0"
        )


@check("data.skip")
def _left_out(config: Config) -> Iterator[str]:
    text = config.data.skip
    problem = problem_of(text)
    if problem:
        yield f"data.skip is {shown(text)}: {problem}"


@check("data.skip", "train.steps", "train.epochs")
def _left_out_in_time(config: Config) -> Iterator[str]:
    text = config.data.skip
    steps = config.train.steps
    if not text or problem_of(text) or config.train.epochs or not steps:
        return
    ranges = ranges_of(text)
    last = batches_until(ranges, steps)
    if ranges[-1][0] > last:
        yield (
            f"data.skip {text} has batch {ranges[-1][0]}, but the last batch of train.steps {steps} is {last}; leave "
            "it out, or train longer"
        )


check(*spikes.KNOBS)(spikes.refused)


@check("sample.every", "sample.prompts", "model.family")
def _sampled(config: Config) -> Iterator[str]:
    sample = config.sample
    if sample.every and config.model.images:
        yield f"sample.every is {sample.every}, but model.family {config.model.family} writes no text; set it to 0"
    elif sample.every and not sample.prompts.strip():
        yield f"sample.every is {sample.every}, but sample.prompts has no text to continue; give one a line"
    elif sample.every and not all(sample.prompts.splitlines()):
        yield "sample.prompts has an empty line, which nothing continues; leave it out"


@check("profile.steps")
def _profiled(config: Config) -> Iterator[str]:
    steps = config.profile.steps
    if steps and not RANGE.fullmatch(steps):
        yield f"profile.steps is {shown(steps)}: must be a step, counted from 1, or a range of steps, such as 10-12"
    elif steps and not config.profile.numbers:
        first, last = steps.split("-")
        yield f"profile.steps {steps} ends before it begins; write {last}-{first}"


@check("profile.steps", "train.steps", "train.epochs")
def _profiled_in_time(config: Config) -> Iterator[str]:
    profile = config.profile
    steps = config.train.steps
    if config.train.epochs or not RANGE.fullmatch(profile.steps):
        return
    if profile.numbers and profile.numbers[-1] > steps > 0:
        yield f"profile.steps {profile.steps} goes beyond train.steps {steps}; profile earlier steps, or train longer"
