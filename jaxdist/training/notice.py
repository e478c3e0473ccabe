"""A notice to a web address when a run ends early: one JSON by a POST, for a person or a program that watches runs."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from jaxdist.cluster import faults
from jaxdist.cluster.job import Job
from jaxdist.config import RequestError
from jaxdist.process.exit_codes import BUSY, DONE, FAILED, OUTCOMES
from jaxdist.training.run_dir import RunFolder

SECONDS = 5.0
"""How long a notice may take in all. A process that ends has hardly more: its scheduler kills it after its grace."""

LONGEST = 1000
"""Characters of the reason that are sent."""


@contextmanager
def giving_notice(address: str, folder: RunFolder, job: Job) -> Iterator[None]:
    """Let process 0 give notice to `address`, if it is not empty, when the run in the block fails or stops early.

    What ends all processes at once, or the job itself, calls the exit hooks; one process may raise its error instead.
    """
    if not address or not job.env.leader:
        yield
        return
    notice = Notice(address, folder, job)
    faults.exit_hooks.append(notice.ended)
    try:
        yield
    except Exception as error:
        # Several processes end through the hook, after the others have been told.
        if job.env.alone:
            code = error.exit_code if isinstance(error, RequestError) else FAILED
            notice.ended(code, faults.error_lines(error)[-1])
        raise
    finally:
        if job.env.alone:
            faults.exit_hooks.remove(notice.ended)


class Notice:
    """What is posted when a run ends, once."""

    def __init__(self, address: str, folder: RunFolder, job: Job):
        self._address = address
        self._folder = folder
        self._job = job
        self._given = False

    def ended(self, code: int, reason: str = "") -> None:
        """Post that the run has ended with exit code `code`, unless it is done, or only waits for its folder.

        The `reason` is by default the last line of the log. A post that fails is one line there. Returns in `SECONDS`.
        """
        if self._given or code in (DONE, BUSY):
            return
        self._given = True
        problem = [f"no answer in {SECONDS:g} s"]
        # The time-out of urllib holds for each wait on the socket, and for none on DNS.
        thread = threading.Thread(target=self._post, args=[self._text(code, reason), problem], daemon=True)
        thread.start()
        thread.join(SECONDS)
        if problem:
            self._job.log.write(f"no notice could be given to {urlsplit(self._address).hostname}: {problem[0]}")

    def _text(self, code: int, reason: str) -> str:
        """Return the JSON: nothing of the environment, and of the request only the name of the folder."""
        return json.dumps(
            {
                "run": self._folder.identity(),
                "folder": self._folder.path.name,
                "step": self._job.watchdog.step,
                "outcome": OUTCOMES.get(code, "failed"),
                "exit_code": code,
                "reason": (reason or self._job.log.last)[:LONGEST],
            }
        )

    def _post(self, text: str, problem: list[str]) -> None:
        """Post the text, and empty `problem` if it was taken; otherwise put the reason there."""
        request = urllib.request.Request(self._address, text.encode(), {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=SECONDS).close()
            problem.clear()
        except Exception as error:
            problem[:] = [str(error)[:LONGEST]]
