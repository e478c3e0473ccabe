"""What a run tells while it runs: metrics.jsonl, TensorBoard, wandb, and a line or a progress bar on the terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import suppress

from jaxdist.config import Config
from jaxdist.files import open_no_follow
from jaxdist.streams import clock
from jaxdist.training.console import Screen
from jaxdist.training.run_dir import RunFolder


class Log:
    """The sinks of a run that goes on after step `first`. Open it with `with`; `screen` is where people read, standard
    error by default."""

    def __init__(self, config: Config, folder: RunFolder, steps: int, first: int, screen: Screen | None = None):
        self._config, self._folder, self._steps, self._first = config, folder, steps, first
        self.screen = screen or Screen()
        self._lines = self._board = self._wandb = None

    def __enter__(self) -> Log:
        self._lines = open_no_follow(self._folder.metrics, "a")
        if self._config.log.tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(self._folder.tensorboard), purge_step=self._first + 1)
        if self._config.log.wandb:
            self._wandb = _start_wandb(self._config, self._folder, self.say)
        return self

    def __exit__(self, *_: object) -> None:
        self.pause()
        with suppress(OSError):  # what could not be written was told when it was to be
            self._lines.close()
        if self._board:
            self._board.close()
        if self._wandb:
            self._guard(lambda: self._wandb.finish())

    def say(self, text: str) -> None:
        """A line for people."""
        self.screen.say(text)

    def metrics(self, values: Mapping[str, float | int | None]) -> None:
        """A line of metrics.jsonl, with the time, for the step `values["step"]`; what is not finite becomes null."""
        finite = {name: value if _finite(value) else None for name, value in values.items()}
        self._lines.write(json.dumps({"step": values["step"], "time": clock(), **finite}) + "\n")
        self._lines.flush()
        numbers = {name: value for name, value in finite.items() if value is not None and name != "step"}
        if self._board:
            for name, value in numbers.items():
                self._board.add_scalar(name, value, values["step"])
        if self._wandb:
            self._guard(lambda: self._wandb.log(numbers, step=values["step"]))
        if "validation_loss" in values:
            accuracy = f"  accuracy {values['validation_accuracy']:.2%}" if "validation_accuracy" in values else ""
            batches = values.get("validation_batches")
            over = "" if batches is None else f" over {batches} batch{'es' * (batches > 1)}"
            self.screen.say_with_time(
                f"step {values['step']}  validation loss {values['validation_loss']:.4f}{over}{accuracy}"
            )
        else:
            self.screen.line(_line(values, self._steps))

    def progress(self, values: Mapping[str, float | int | None]) -> None:
        """Move the bar of a terminal to `values["step"]`; a pipe or file has its lines."""
        self.screen.move("training", values["step"], self._steps, _figures(values))

    def pause(self) -> None:
        """Leave the bar as it is and free the terminal."""
        self.screen.pause()

    def _guard(self, call) -> None:
        """Reporting to a service never stops a run: the first failure is told, then it is left alone."""
        try:
            call()
        except Exception as error:  # whatever a network and somebody else's client may raise
            self._wandb = None
            self.say(f"warning: wandb failed and is switched off for this run: {error}")


class Silent(Log):
    """The log of a process that is not the leader: it tells nothing."""

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def metrics(self, values: Mapping[str, float | int | None]) -> None:
        pass

    def progress(self, values: Mapping[str, float | int | None]) -> None:
        pass


def _start_wandb(config: Config, folder: RunFolder, say):
    try:
        import wandb

        settings = wandb.Settings(init_timeout=10, silent=True)
        return wandb.init(
            project=config.log.wandb,
            name=folder.path.name,
            id=folder.wandb_id(),
            resume="allow",  # a run that goes on is the same run there
            dir=str(folder.path),
            config=config.model_dump(mode="json"),
            settings=settings,
        )
    except Exception as error:
        say(f"warning: wandb could not start and is switched off for this run: {error}")
        return None


def _finite(value: float | int | None) -> bool:
    return value is not None and math.isfinite(value)


def _figures(values: Mapping[str, float | int | None]) -> str:
    mfu = "" if values["mfu"] is None else f"  MFU {values['mfu']:.1%}"
    unit, rate = next((name.split("_")[0], rate) for name, rate in values.items() if name.endswith("s_per_second"))
    return f"loss {values['loss']:.4f}  {rate:,.0f} {unit}/s{mfu}"


def _line(values: Mapping[str, float | int | None], steps: int) -> str:
    """Short, because a log has thousands of them: of the wait for data only where there is some to speak of."""
    seconds, waiting = values["step_seconds"], values["data_seconds"]
    data = f"  data {waiting * 1e3:.1f} ms" if waiting > 0.01 * seconds else ""
    to_go = steps - values["step"]
    left = f"  {duration(to_go * seconds)} left" if to_go else ""
    return (
        f"step {values['step']}/{steps}  {_figures(values)}  norm {values['grad_norm']:.3f}  "
        f"lr {values['learning_rate']:.2e}  {seconds * 1e3:.0f} ms{data}{left}"
    )


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, such as 0:12:30."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
