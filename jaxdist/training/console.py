"""Where people read the output of a run: a bar and lines on a terminal, plain lines in a pipe, and log.txt always."""

from __future__ import annotations

import io
import sys
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from jaxdist.output.streams import LogFile, Unfailing, printable, time_of_day


class Screen:
    """Prints lines and a progress bar."""

    def __init__(self, text: IO[str] | None = None, log: LogFile | None = None):
        """`text` is a stream, standard error by default; `log` gets every line too."""
        # Without standard error there is no reader, and log.txt has it all.
        stream: Any = text or sys.stderr or io.StringIO()
        if isinstance(stream, Unfailing):
            # It draws the bar with control characters, and prints what is printable.
            stream = stream.raw
        self.log = log or LogFile()
        self._console = Console(
            file=stream, force_terminal=stream.isatty(), highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._progress: Progress | None = None
        self._task = TaskID(0)

    @property
    def is_terminal(self) -> bool:
        """Whether a person looks at a terminal, not a pipe or a file."""
        return self._console.is_terminal

    def say(self, text: str) -> None:
        """Print a line for people."""
        self.log.write(text)
        self._print(text)

    def say_with_time(self, text: str) -> None:
        """Print one of many lines: in a pipe it ends with the time of day, in UTC."""
        self.log.write(text)
        if self.is_terminal:
            self._print(text)
        else:
            self._print(f"{text}  {time_of_day()}")

    def line(self, text: str) -> None:
        """Print as `say_with_time`, but nothing on a terminal, where the bar shows it.

        The text goes to log.txt in both cases.
        """
        self.log.write(text)
        if not self.is_terminal:
            self._print(f"{text}  {time_of_day()}")

    def move(self, what: str, completed: int, total: int, figures: str) -> None:
        """Move the bar of a terminal, and make it if there is none; a pipe or file has its lines."""
        if not self.is_terminal:
            return
        if self._progress is None:
            columns = [TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}")]
            self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console)
            self._progress.start()
            self._task = self._progress.add_task("", total=total, completed=completed)
        self._progress.update(self._task, completed=completed, description=figures)

    def pause(self) -> None:
        """Leave the bar as it is and free the terminal.

        The next update of the progress draws a new bar below.
        """
        if self._progress:
            self._progress.stop()
            self._progress = None

    def _print(self, text: str) -> None:
        console = self._progress.console if self._progress else self._console
        console.print(printable(text))
