"""Whether a request may go on with a run that was made with another: what must be the same, and the one exception."""

from __future__ import annotations

from jaxdist.config import Config, leaves
from jaxdist.request.reading import usual_warmup

FREE_ON_RESUME = ("mesh", "run_dir", "resume", "data.prefetch", "model.remat", "parallel", "pipeline", "validation")
FREE_ON_RESUME += ("checkpoint", "log", "profile", "cluster", "fault")
"""Keys (or whole sections) that may differ when a run goes on: they do not change what is learned."""

STEPS, EPOCHS, WARMUP = "train.steps", "train.epochs", "optimizer.warmup"


def differing(old: Config, new: Config) -> list[str]:
    """Dotted names of the knobs that differ and must not when a run goes on.

    Values that follow from others are not compared: the user has asked for the others alone.
    """
    free = set()
    if not new.model.images:
        free.add("train.accumulation")  # batch norm takes the statistics of a micro-batch
    if old.train.epochs or new.train.epochs:
        free.add(STEPS)  # epochs hold in its place
    if _warmup_is_derived(old) and _warmup_is_derived(new):
        free.add(WARMUP)
    old_values, new_values = leaves(old), leaves(new)
    return [
        name
        for name, value in new_values.items()
        if old_values[name] != value and name not in free and not _free_on_resume(name)
    ]


def lengthened(old: Config, new: Config, step: int) -> str | None:
    """A sentence where `new` asks for nothing but more steps than `old`, and may from `step` on; None otherwise.

    The learning rate of the steps so far must be that of the longer run: only the constant schedule does not depend on
    the number of steps, after its warm-up and until it decays.
    """
    before, after = old.train.steps, new.train.steps
    constant = new.optimizer.schedule == "constant"
    if differing(old, new) != [STEPS] or after < before or not constant or step < old.optimizer.warmup:
        return None
    told = f"train.steps is raised from {before} to {after}"
    decays = before - 1 - old.optimizer.decay_steps(before)
    if step > decays + 1:
        told += f"; the learning rate, which has decayed since step {decays + 1}, goes back to its peak"
    return told


def refusal(old: Config, new: Config) -> str:
    """Which knobs differ, and what to do, as a part of a sentence."""
    names = differing(old, new)
    changes = ", ".join(f"{name} ({_value(old, name)} there, {_value(new, name)} here)" for name in names)
    why = ""
    if STEPS in names and new.train.steps > old.train.steps:
        why = (
            "train.steps can be raised, and nothing else with it, where optimizer.schedule is constant and its warm-up "
            "is over; "
        )
    return (
        f"{changes}; {why}ask for the same, or name another --run-dir, where --init-from begins with the weights of "
        f"this run"
    )


def with_warmup(config: Config, warmup: int) -> Config:
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"warmup": warmup})})


def _warmup_is_derived(config: Config) -> bool:
    """Whether it is what it is without being asked for. A run's config.toml does not tell."""
    return config.optimizer.warmup == usual_warmup(config.train.steps, config.train.epochs)


def _free_on_resume(name: str) -> bool:
    return name in FREE_ON_RESUME or name.split(".")[0] in FREE_ON_RESUME


def _value(config: Config, name: str) -> object:
    return leaves(config)[name]
