"""The metrics of a run as event files for TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PATIENCE = 30.0
"""Seconds that events may wait in memory: each flush waits for the disk."""


class Board:
    """Writes event files. It never stops training: at the first failure, such as a full disk, it is switched off.

    `tensorboardX.SummaryWriter` writes in a thread. That dies at a failure, and then fills a queue at which the run
    would wait for ever.
    """

    def __init__(self, folder: Path, first: int, say: Callable[[str], None]):
        """Write into `folder`; TensorBoard forgets what earlier files have of steps after `first`."""
        # They take a while to import.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        self._say = say
        self._event = Event
        self._flushed = time.monotonic()
        self._events: EventsWriter | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._events = EventsWriter(str(folder / "events"))
        except OSError as error:
            self._switch_off(error)
        self._write(first + 1, session_log=SessionLog(status=SessionLog.START))

    def scalars(self, values: Mapping[str, float | int], step: int) -> None:
        """Write numbers by name."""
        from tensorboardX.summary import scalar

        for name, value in values.items():
            self._write(step, summary=scalar(name, value))

    def text(self, name: str, text: str, step: int) -> None:
        """Write a text, which is shown as Markdown."""
        from tensorboardX.summary import text as summary

        self._write(step, summary=summary(name, text))

    def close(self) -> None:
        """Write what is still in memory."""
        try:
            if self._events:
                self._events.close()
        except OSError as error:
            self._switch_off(error)

    def _write(self, step: int, **content: Any) -> None:
        if not self._events:
            return
        try:
            self._events.write_event(self._event(step=step, wall_time=time.time(), **content))
            if time.monotonic() > self._flushed + PATIENCE:
                self._events.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            self._switch_off(error)

    def _switch_off(self, error: OSError) -> None:
        self._events = None
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        self._say(f"warning: TensorBoard's files cannot be written ({reason}), and get no more of this run")
