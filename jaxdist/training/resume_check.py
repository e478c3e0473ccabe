"""Whether a run may be resumed with another configuration: which keys must be equal, and the one exception."""

from __future__ import annotations

from jaxdist.config import Config, leaves
from jaxdist.config.left_out import batches_until, first_difference, ranges_of, steps_before
from jaxdist.mesh import crossing
from jaxdist.optimizers.schedules import SCHEDULES
from jaxdist.request.reading import usual_warmup

FREE_ON_RESUME = (
    "mesh",
    "run_dir",
    "resume",
    "data.path",
    "data.validation_path",
    "data.changed",
    "data.skip",
    "data.on_error",
    "data.dtype",
    "data.prefetch",
    "model.remat",
    "model.unroll_layers",
    "model.attention",
    "model.capacity_factor",
    "train.deterministic",
    "train.spike",
    "train.max_raised",
    "parallel",
    "pipeline",
    "validation",
    "checkpoint",
    "log",
    "sample",
    "profile",
    "cluster",
    "fault",
)
"""Keys (or whole sections) that may differ when a run is resumed: they do not change what is learned, or what they
change is compared elsewhere (where the data are and how they are read, by the fingerprint of what was read; which
batches are left out, by `other_batches`). `train.spike` is how a run that has spiked goes on without the next spike.
`train.max_raised` only says when a run ends.

PipeDream's updates depend on stages and on when the pipeline is drained. There, `pipeline`, and how often a run
validates or saves, change what is learned; with `parallel.delayed_gradients`, that and whether there are replicas."""

STEPS = "train.steps"
WARMUP = "optimizer.warmup"


def differing(old: Config, new: Config) -> list[str]:
    """Return the dotted names of the knobs that differ, and must not when a run is resumed.

    Derived values are not compared: the user has only asked for the values that they follow from.
    """
    free = set()
    if not new.model.images:
        # It matters for images only: batch norm takes the statistics of a micro-batch.
        free.add("train.accumulation")
    if old.train.epochs or new.train.epochs:
        # The number of epochs decides, and is compared.
        free.add(STEPS)
    if _warmup_is_derived(old) and _warmup_is_derived(new):
        free.add(WARMUP)
    if old.data.mixture and new.data.mixture:
        # What every checkpoint keeps of it is compared (`training.mixture_record`).
        free.add("data.mixture")
        if new.data.changed:
            # The run goes on with its own, and each source is known again by its fingerprint.
            free.add("data.tokenizer")
    if new.model.frozen and new.init_from:
        # The base may have moved: it is known again by its digest.
        free.add("init_from")
        if (old.data.tokenizer, new.data.tokenizer) == (old.init_from, new.init_from):
            free.add("data.tokenizer")
    old_values = leaves(old)
    new_values = leaves(new)
    return [
        name
        for name, value in new_values.items()
        if old_values[name] != value and name not in free and not _free_on_resume(name)
    ]


def lengthened(old: Config, new: Config, step: int) -> str | None:
    """Return a sentence if `new` only asks for more steps than `old`, and may do so from `step` on; None otherwise.

    The learning rate of the steps so far must be that of the longer run: an open-ended schedule does not depend on the
    number of steps, after its warm-up and until it decays.
    """
    before = old.train.steps
    after = new.train.steps
    if differing(old, new) != [STEPS] or after < before or not new.optimizer.open_ended or step < old.optimizer.warmup:
        return None
    sentence = f"train.steps is raised from {before} to {after}"
    decay_start = before - old.optimizer.decay_steps(before)
    if step > decay_start:
        sentence += f"; the learning rate, which has decayed since step {decay_start}, goes back up"
    return sentence


def other_data(old: Config, new: Config) -> str:
    """Return which data a run is to read that are called otherwise than so far, as a phrase; empty where none are."""
    names = ("data.path", "data.validation_path")
    there, here = leaves(old), leaves(new)
    return ", ".join(f"{name} ({there[name]} there, {here[name]} here)" for name in names if there[name] != here[name])


def other_batches(old: Config, new: Config, step: int) -> str:
    """Return why a run cannot go on from `step` and leave out other batches than before, as the end of a sentence.

    It is empty where both take the same batches up to that step.
    """
    before, after = ranges_of(old.data.skip), ranges_of(new.data.skip)
    batch = first_difference(before, after)
    if batch is None or batch > batches_until(before, step):
        return ""
    there, here = old.data.skip or "empty", new.data.skip or "empty"
    return (
        f"data.skip ({there} there, {here} here) differs from batch {batch} on, and step {step} has taken batch "
        f"{batches_until(before, step)}; ask for the same, or go back, by --resume, to step "
        f"{steps_before(before, batch)} or one before it"
    )


def refusal(old: Config, new: Config) -> str:
    """Return which knobs differ, and what to do, as the end of a sentence; empty where none does."""
    names = differing(old, new)
    if not names:
        return ""
    there = leaves(old)
    here = leaves(new)
    changes = ", ".join(f"{name} ({there[name]} there, {here[name]} here)" for name in names)
    why = ""
    schedules = " or ".join(name for name, row in SCHEDULES.items() if row.open_ended)
    if STEPS in names and new.train.steps > old.train.steps:
        why = (
            f"train.steps can be raised, and nothing else with it, where optimizer.schedule is {schedules} and its "
            "warm-up is over; "
        )
    return (
        f"{changes}; {why}ask for the same, or name another --run-dir, where --init-from begins with the weights of "
        f"this run"
    )


def _warmup_is_derived(config: Config) -> bool:
    """Return whether the warm-up has its default, which follows from steps and epochs.

    A run's config.toml does not say whether somebody asked for it.
    """
    return config.optimizer.warmup == usual_warmup(config.train.steps, config.train.epochs)


def _free_on_resume(name: str) -> bool:
    if name in crossing.KNOBS:
        return False
    section = name.split(".")[0]
    return name in FREE_ON_RESUME or section in FREE_ON_RESUME
