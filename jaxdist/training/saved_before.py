"""What shows that a run has saved a step, for a run folder in which there is none: a volume may not be mounted.

Such a run must not begin again by itself: it would write over what is left of the first one. No jax here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from jaxdist.config import Config
from jaxdist.files import read_regular
from jaxdist.training import history
from jaxdist.training.run_facts import FILE, SAVED, run_facts

STOPPED = re.compile(rb"^\S+  stopped by \w+: step ([0-9]{1,10}) is saved;", re.MULTILINE)
"""A line of log.txt, with its time, in which a run that was stopped says what it has saved."""


def what_shows_a_save(run_dir: Path, seals: Sequence[int], config: Config | None) -> str | None:
    """Return a clause about the file that shows that the run here has saved a step; None where none does.

    `seals` are the steps of which only the seal is left; `config` is that of the run, if it is there. Runs of an older
    jaxdist have no note in run.json.
    """
    step = run_facts(run_dir).get(SAVED)
    if isinstance(step, int):
        return f"{FILE} says that step {step} was saved"
    if seals:
        return f"the checksums of step {max(seals)} are still there"
    if (run_dir / "loss.png").exists():
        return "its loss.png was drawn after the last step was saved"
    for name in ("log.txt", "log.txt.1"):
        step = _last_stop(run_dir / name)
        if step is not None:
            return f"{name} says that step {step} was saved"
    return _long_enough(run_dir, config) if config else None


def _last_stop(log: Path) -> int | None:
    """Return the step that was saved when the run was stopped for the last time, by its log."""
    try:
        found = STOPPED.findall(read_regular(log))
    except OSError:
        return None
    return int(found[-1]) if found else None


def _long_enough(run_dir: Path, config: Config) -> str | None:
    """Return that the metrics go beyond a second save, which begins only when the first one is complete."""
    every = config.checkpoint.every
    last = max((line["step"] for line in history.read(run_dir / "metrics.jsonl")), default=0)
    if every and last > 2 * every + config.train.local_steps:
        return f"metrics.jsonl reaches step {last}, and the run was saved every {every} steps"
    return None
