"""What metrics.jsonl of a run shows: spikes of the loss, slow data, a learning rate that is too high. No jax here.

These are remarks for a person, from thresholds: a run with remarks may learn well, and one without may not.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdist.config import Config
from jaxdist.config.left_out import without
from jaxdist.training import history
from jaxdist.training.history import number

WINDOW = 50
"""Lines before a line, or at the end, that say what is usual."""

FEWEST = 20
"""Lines from which on something is usual."""

SPIKE_DEVIATIONS = 8.0
"""A spike is so many standard deviations above the median of the lines before it, by their median deviation."""

SPIKE_ABOVE = 0.1
"""A spike is above this median by at least that part of its size; a loss of one's own may be negative."""

BACK = 0.05
"""A spike is over when the loss is above the median before it by less than that part of its size."""

LISTED = 3
"""Spikes that are listed; of more, those with the highest loss."""

SLOW_DATA = 0.1
"""Part of a step's time from which on the wait for data is slow."""

SKIPPED = 0.01
"""Part of the updates from which on it is told that they were skipped."""

GROWN = 2.0
"""The gradient norm has grown if its median is that many times the least median of a fifth of the run before."""

PARTS = 5
"""Parts of a run that are compared with each other."""

NORMAL = 1.4826
"""Standard deviations in a median deviation of normally distributed numbers."""


class Line(NamedTuple):
    """What is read of a line for a step."""

    step: int
    loss: float
    norm: float


def remarks(lines: Sequence[Mapping[str, Any]], config: Config | None = None) -> list[str]:
    """Return a sentence for each thing that the lines of metrics.jsonl show; `config` is that of the run, if known."""
    of_steps = [line for line in lines if history.VALIDATED not in line]
    read = []
    for line in of_steps:
        loss, norm = number(line, "loss"), number(line, "grad_norm")
        if loss is not None and norm is not None:
            read.append(Line(line["step"], loss, norm))
    return [*_spikes(read, config), *_slow_data(of_steps), *_skipped(of_steps), *_too_high(read, of_steps)]


def _spikes(lines: Sequence[Line], config: Config | None) -> Iterator[str]:
    """Yield a sentence for the highest spikes of the loss, in order, and how to leave their batches out."""
    found: dict[int, str] = {}
    losses: dict[int, float] = {}
    place = FEWEST
    while place < len(lines):
        before = [line.loss for line in lines[max(0, place - WINDOW) : place]]
        usual = statistics.median(before)
        deviation = NORMAL * statistics.median(abs(loss - usual) for loss in before)
        line = lines[place]
        if line.loss <= usual + max(SPIKE_DEVIATIONS * deviation, SPIKE_ABOVE * abs(usual)):
            place += 1
            continue
        # Until it is over, no line is a spike of its own.
        back = usual + BACK * abs(usual)
        end = next((later for later in range(place, len(lines)) if lines[later].loss < back), len(lines))
        highest = max(lines[place:end], key=lambda one: one.loss)
        over = f"over at step {lines[end].step}" if end < len(lines) else "not over yet"
        left_out = config.data.skip if config else ""
        found[line.step] = (
            f"the loss spiked at step {line.step}: {highest.loss:.4g} at most, {usual:.4g} before, gradient norm "
            f"{line.norm:.3g}; {over}; {without(left_out, lines[place - 1].step, line.step)}"
        )
        losses[line.step] = highest.loss
        place = end + 1
    listed = sorted(sorted(found, key=lambda step: -losses[step])[:LISTED])
    yield from (found[step] for step in listed)
    if len(found) > LISTED:
        yield f"the loss spiked {len(found) - LISTED} more times, less high"


def _slow_data(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence if the newest steps wait long for data."""
    shares = []
    for line in lines[-WINDOW:]:
        step, wait = number(line, "step_seconds"), number(line, "data_seconds")
        if step and wait is not None:
            shares.append(wait / step)
    if len(shares) >= FEWEST and statistics.median(shares) >= SLOW_DATA:
        yield (
            f"steps wait {100 * statistics.median(shares):.0f} % of their time for data (median of the last "
            f"{len(shares)} lines): a slow file system, or too few cores for the process that reads"
        )


def _skipped(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence if many updates were skipped."""
    skipped = number(lines[-1], "skipped") if lines else None
    if skipped and skipped >= SKIPPED * lines[-1]["step"]:
        yield (
            f"{skipped:.0f} of {lines[-1]['step']} updates were skipped, because a loss or gradient was "
            f"{_why(number(lines[-1], 'spikes') or 0, skipped)}: lower optimizer.learning_rate, or see whether the "
            f"data or the precision is the cause"
        )


def _why(spikes: float, skipped: float) -> str:
    """Return what was wrong with updates that were skipped, so many of them for a spike."""
    if not spikes:
        return "not finite"
    return "a spike" if spikes == skipped else f"not finite, or a spike ({spikes:.0f})"


def _too_high(lines: Sequence[Line], of_steps: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence if the gradient norm has grown since its least, while the loss no longer falls."""
    rates = {line["step"]: rate for line in of_steps if (rate := number(line, "learning_rate")) is not None}
    # In the warm-up both change with the learning rate.
    warm = max(rates, key=lambda step: rates[step], default=0)
    later = [line for line in lines if line.step >= warm]
    length = len(later) // PARTS
    if length < FEWEST // 2:
        return
    parts = [later[number * length : (number + 1) * length] for number in range(PARTS - 1)]
    newest = later[-length:]
    calmest, lowest = min(parts, key=_norm), min(parts, key=_loss)
    if not _norm(newest) >= GROWN * _norm(calmest) > 0 or _loss(newest) < _loss(lowest):
        return
    rate = rates.get(newest[-1].step)
    named = "the learning rate" if rate is None else f"the learning rate ({rate:.3g})"
    yield (
        f"the gradient norm has grown from {_norm(calmest):.3g} ({_steps(calmest)}) to {_norm(newest):.3g}, while the "
        f"loss no longer falls ({_loss(lowest):.4g} in {_steps(lowest)}, {_loss(newest):.4g} now): {named} may be too "
        f"high"
    )


def _norm(part: Sequence[Line]) -> float:
    return statistics.median(line.norm for line in part)


def _loss(part: Sequence[Line]) -> float:
    return statistics.median(line.loss for line in part)


def _steps(part: Sequence[Line]) -> str:
    return f"steps {part[0].step} to {part[-1].step}"
