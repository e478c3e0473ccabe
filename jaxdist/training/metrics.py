"""The outputs of a run: metrics.jsonl, TensorBoard, wandb, and a line or a progress bar on the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import IO, Any

from jaxdist.config import LogConfig
from jaxdist.files import open_no_follow
from jaxdist.output.streams import clock
from jaxdist.output.units import hours
from jaxdist.training.console import Screen
from jaxdist.training.history import PER_SECOND, unit_of
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import wandb_id
from jaxdist.training.tensorboard import Board
from jaxdist.training.validation import losses_of_sources

Values = Mapping[str, float | int | None]
"""The figures of a step, or of a validation, by their names in metrics.jsonl."""

LISTED = 8
"""Sources whose losses the line of a validation has at most."""

NOTABLE_WAIT = 0.01
"""Part of a step's time from which on the wait for data is printed."""


class Log:
    """The outputs of a run that continues after step `first`. Use it as a context manager."""

    def __init__(
        self,
        config: LogConfig,
        folder: RunFolder,
        steps: int,
        first: int,
        screen: Screen | None = None,
        settings: Mapping[str, Any] = MappingProxyType({}),
    ):
        """`screen` is where people read, standard error by default; `settings` of the run are shown by wandb."""
        self._config = config
        self._settings = settings
        self._folder = folder
        self._steps = steps
        self._first = first
        self.screen = screen or Screen()
        self._lines: IO[str] | None = None
        self._board: Board | None = None
        self._wandb: Any = None

    def __enter__(self) -> Log:
        self._lines = open_no_follow(self._folder.metrics, "a")
        if self._config.tensorboard:
            self._board = Board(self._folder.tensorboard, self._first, self.say)
        if self._config.wandb:
            self._wandb = _start_wandb(self._config.wandb, self._settings, self._folder, self.say)
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()
        # A line that could not be written was reported then.
        with suppress(OSError):
            self._file.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._call_wandb("finish")

    @property
    def _file(self) -> IO[str]:
        """metrics.jsonl, open; within the context alone."""
        assert self._lines is not None
        return self._lines

    def say(self, text: str) -> None:
        """Print a line for people."""
        self.screen.say(text)

    def metrics(self, values: Values) -> None:
        """Write a line of metrics.jsonl, with the time, for the step `values["step"]`; NaN and infinity become null."""
        step = values["step"]
        finite = {name: value if _finite(value) else None for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": clock(), **finite}) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in finite.items() if value is not None and name != "step"}
        if self._board:
            self._board.scalars(numbers, int(_number(values, "step")))
        if self._wandb:
            self._call_wandb("log", numbers, step=step)
        if "validation_loss" in values:
            self.screen.say_with_time(_validation_line(values))
        else:
            self.screen.line(_line(values, self._steps))

    def samples(self, step: int, texts: list[str]) -> None:
        """Print what the run has written after `step`, and keep it in TensorBoard and at Weights & Biases."""
        named = {f"sample/{number}": text for number, text in enumerate(texts, start=1)}
        for name, text in named.items():
            self.say(f"sample      step {step}: {json.dumps(text, ensure_ascii=False)}")
            if self._board:
                # The board reads Markdown: four spaces keep the text as it is.
                self._board.text(name, "    " + text.replace("\n", "\n    "), step)
        if self._wandb:
            self._call_wandb("log", named, step=step)

    def progress(self, step: int, values: Values) -> None:
        """Move the bar of a terminal to `step`, beside the newest figures, if any; a pipe or file has its lines."""
        self.screen.move("training", step, self._steps, _figures(values) if values else "")

    def pause(self) -> None:
        """Leave the bar as it is and free the terminal."""
        self.screen.pause()

    def _call_wandb(self, method: str, *arguments: Any, **options: Any) -> None:
        """Call a method of the wandb run. A service never stops training: at the first failure it is switched off."""
        try:
            getattr(self._wandb, method)(*arguments, **options)
        except Exception as error:  # whatever a network and somebody else's client may raise
            self._wandb = None
            self.say(f"warning: wandb failed and is switched off for this run: {error}")


class SilentLog(Log):
    """The log of a process that is not the leader: it writes nothing."""

    def __enter__(self) -> SilentLog:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        """Do nothing."""

    def metrics(self, values: Values) -> None:
        """Do nothing."""

    def samples(self, step: int, texts: list[str]) -> None:
        """Do nothing."""

    def progress(self, step: int, values: Values) -> None:
        """Do nothing."""


def _start_wandb(project: str, config: Mapping[str, Any], folder: RunFolder, say: Callable[[str], None]) -> Any:
    """Start the run at Weights & Biases; None, with a warning, where that fails."""
    try:
        import wandb

        settings = wandb.Settings(init_timeout=10, silent=True)
        return wandb.init(
            project=project,
            name=folder.path.name,
            id=wandb_id(folder.path),
            # A run that is resumed here is the same run there.
            resume="allow",
            dir=str(folder.path),
            config=dict(config),
            settings=settings,
        )
    except Exception as error:
        say(f"warning: wandb could not start and is switched off for this run: {error}")
        return None


def _finite(value: float | int | None) -> bool:
    return value is not None and math.isfinite(value)


def _number(values: Values, name: str) -> float | int:
    """Return a figure that every step has."""
    value = values[name]
    assert value is not None
    return value


def _figures(values: Values) -> str:
    """Return loss, speed and MFU, as the bar and the lines show them."""
    unit = unit_of(values)
    text = f"loss {values['loss']:.4f}  {values[unit + PER_SECOND]:,.0f} {unit}s/s"
    if values["mfu"] is not None:
        text += f"  MFU {values['mfu']:.1%}"
    return text


def _line(values: Values, steps: int) -> str:
    """Return the line of a step, short because a log has thousands: the wait for data only where it is notable."""
    step = _number(values, "step")
    seconds = _number(values, "step_seconds")
    waiting = _number(values, "data_seconds")
    line = (
        f"step {step}/{steps}  {_figures(values)}  norm {values['grad_norm']:.3f}  "
        f"{_rate(values)}{seconds * 1e3:.0f} ms"
    )
    if waiting > NOTABLE_WAIT * seconds:
        line += f"  data {waiting * 1e3:.1f} ms"
    if "reward_margin" in values:
        line += f"  margin {values['reward_margin']:.3f}  accuracy {values['accuracy']:.1%}"
    if "load_max" in values:
        line += f"  load {values['load_max']:.2f}"
    steps_left = steps - step
    if steps_left:
        line += f"  {hours(steps_left * seconds)} left"
    return line


def _rate(values: Values) -> str:
    """Return the learning rate, where it is known."""
    return f"lr {values['learning_rate']:.2e}  " if "learning_rate" in values else ""


def _validation_line(values: Values) -> str:
    line = f"step {values['step']}  validation loss {values['validation_loss']:.4f}"
    batches = values.get("validation_batches")
    if batches is not None:
        line += f" over {batches} {'batches' if batches > 1 else 'batch'}"
    if "validation_accuracy" in values:
        line += f"  accuracy {values['validation_accuracy']:.2%}"
    if "validation_reward_margin" in values:
        line += f"  margin {values['validation_reward_margin']:.3f}"
    losses = losses_of_sources(values, "validation_")
    if losses:
        named = [f"{name} {loss:.4f}" for name, loss in list(losses.items())[:LISTED]]
        more = [f"{len(losses) - LISTED} more in metrics.jsonl"] if len(losses) > LISTED else []
        line += f"  ({', '.join([*named, *more])})"
    return line
