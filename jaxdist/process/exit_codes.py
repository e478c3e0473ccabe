"""Exit codes of jaxdist's commands. Launchers and Slurm scripts decide by them whether to start a run again."""

from __future__ import annotations

import signal

DONE = 0
"""Success, or nothing was left to do."""

FAILED = 1
"""A failure that the same command may survive: launchers start the run again."""

REFUSED = 2
"""The request is invalid, so that the same command would fail again: launchers give up."""

BUSY = 75
"""Another process uses the run folder: launchers wait and try again. EX_TEMPFAIL of BSD's sysexits.h."""

STOPPED = 85
"""Stopped early by a signal; the same command resumes the run."""

OUTCOMES = {DONE: "done", STOPPED: "stopped"}
"""Outcome of a run by its exit code; any other code is a failure."""


def is_result(code: int) -> bool:
    """Return whether an exit code of a user's script is a result of its own, with which a launcher ends as well.

    After the others it starts the script again: 1, of an exception; the codes above; and signals, 128 and more in a
    shell.
    """
    return FAILED < code < 128 and code not in (BUSY, STOPPED)


def how_it_ended(code: int) -> str:
    """Return how a process ended, by the code that `subprocess` gives: with a code, or by a signal."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with {code}"
