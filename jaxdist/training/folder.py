"""The folder of a run: what lies in it, and whether a run may start, go on, or is already done there."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

from tokenizers import Tokenizer

from jaxdist import __version__
from jaxdist.config import Config, RequestError, leaves
from jaxdist.request import load, to_toml
from jaxdist.training.shelf import Shelf

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

FREE_ON_RESUME = ("mesh", "run_dir", "resume", "data.prefetch", "model.remat", "parallel", "pipeline", "validation")
FREE_ON_RESUME += ("checkpoint", "log", "profile", "cluster", "fault")
"""Keys (or whole sections) that may differ when a run goes on: they do not change what is learned."""


class RunFolder:
    """Paths of a run's files, and the rules for entering the folder."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.environment = self.path / "environment.json"
        self.tokenizer = self.path / "tokenizer.json"
        self.metrics = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.heartbeats = self.path / "heartbeats"
        self.plot = self.path / "loss.png"
        self.tensorboard = self.path / "tensorboard"

    def enter(self, config: Config) -> Config:
        """What to run here: `config`, with the precision of the run that is here where it leaves that open, and the
        tokenizer that belongs to the weights that it begins with.

        Raises `RequestError` when `config` must not be run here. Writes nothing.
        """
        if not self.config.exists():
            there = os.listdir(self.path) if self.path.exists() else []
            strangers = set(there) - {".lock", "checkpoints", "heartbeats", "slurm"}
            if strangers:
                raise RequestError(
                    f"run folder {self.path} holds no run, but other things ({', '.join(sorted(strangers)[:3])}); "
                    f"name another --run-dir"
                )
            if config.resume.isdigit():
                raise RequestError(f"run folder {self.path} holds no run to go back to step {config.resume} of")
            return inheriting(config)
        if config.resume == "never":
            raise RequestError(
                f"run folder {self.path} holds a run already and --resume is never; "
                f"name another --run-dir, or go on with --resume auto"
            )
        steps = Shelf(self.checkpoints).sealed()
        if config.resume.isdigit() and int(config.resume) not in steps:
            there = f"its steps are {', '.join(map(str, steps))}" if steps else "it holds none"
            raise RequestError(f"run folder {self.path} holds no checkpoint of step {config.resume}; {there}")
        if not steps:
            return inheriting(config)  # it died before it had learned anything that could be kept
        old = load(str(self.config), {}, knobs=())
        if config.precision == "auto":
            config = config.model_copy(update={"precision": old.precision})
        if config.init_from and not config.data.tokenizer:
            config = _with_tokenizer(config, old.data.tokenizer)
        if names := differing(old, config):
            changes = ", ".join(f"{name} ({_value(old, name)} there, {_value(config, name)} here)" for name in names)
            raise RequestError(
                f"run folder {self.path} holds a run with another config: {changes}; "
                f"ask for the same, or name another --run-dir"
            )
        return config

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep other processes from training in it. Raises `RequestError` if one does."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("a+")
        except OSError as error:
            raise RequestError(f"run folder {self.path} cannot be written ({error.strerror}); name another") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                lock.seek(0)
                raise RequestError(
                    f"run folder {self.path} is in use by process {lock.read().strip()}; wait for it, or name another "
                    f"--run-dir"
                ) from error
            with suppress(OSError):  # a full disk: it is the lock that counts, and room is made by who holds it
                lock.truncate(0)
                lock.write(str(os.getpid()))
                lock.flush()
            yield

    def same_data(self, there: str, here: str) -> None:
        """Raise `RequestError` when the run here was trained on other data: `there` and `here` are fingerprints."""
        if there != here:
            raise RequestError(
                f"the training data is not what the run in {self.path} has seen so far (fingerprint {here[:12]} here, "
                f"{there[:12]} there); put it back, or name another --run-dir"
            )

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer of the run. Raises `RequestError` when its data came as tokens."""
        if not self.tokenizer.is_file():
            raise RequestError(
                f"{self.path} has no tokenizer.json: the run was trained on tokens; copy their tokenizer there"
            )
        try:
            tokenizer = Tokenizer.from_file(str(self.tokenizer))
        except Exception as error:  # the library raises nothing more precise
            raise RequestError(f"{self.tokenizer} is not a tokenizer ({error}); copy the right one there") from error
        tokenizer.no_truncation()  # as the training data was encoded
        tokenizer.no_padding()
        return tokenizer

    def write(self, config: Config, tokenizer: str | None, devices: list[str], asked: Mapping[str, object]) -> None:
        """Write what tells how the run was made: its configuration, environment and tokenizer; `asked` of XLA."""
        self.path.mkdir(parents=True, exist_ok=True)
        _replace(self.config, to_toml(config.model_copy(update={"resume": "auto"})))  # how to enter is not kept
        _replace(self.environment, json.dumps(environment(devices, asked), indent=2) + "\n")
        if tokenizer is not None:
            _replace(self.tokenizer, tokenizer)

    def cut_metrics(self, step: int) -> None:
        """Drop torn lines of metrics.jsonl and those of steps after `step`, which will be run again."""
        if not self.metrics.exists():
            return
        kept = []
        for line in self.metrics.read_text("utf-8").splitlines():
            try:
                keep = json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                keep = False
            if keep:
                kept.append(line + "\n")
        _replace(self.metrics, "".join(kept))


def checkpoint_of(path: Path) -> tuple[RunFolder, str]:
    """The run, and which of its checkpoints, that `--init-from` names. Raises `RequestError` if it names none."""
    for folder, which in (path, "latest"), (path.parent.parent, path.name):
        if RunFolder(folder).config.is_file() and (which == "latest" or path.parent.name == "checkpoints"):
            return RunFolder(folder), which
    raise RequestError(
        f"init_from {path} is neither the folder of a run nor a checkpoint in one; "
        f"name such as runs/gpt_tiny, or runs/gpt_tiny/checkpoints/best"
    )


def inheriting(config: Config) -> Config:
    """`config` with the tokenizer of the run whose weights it begins with. Raises `RequestError` for another one.

    Data that are tokens already cannot be checked.
    """
    data = config.data
    if not config.init_from:
        return config
    source, _ = checkpoint_of(config.init_from)
    if config.model.images or (data.path and data.path.suffix.lower() == ".bin"):
        return config
    tokenizer = source.load_tokenizer()
    if not data.tokenizer:
        return _with_tokenizer(config, source.tokenizer)
    if Tokenizer.from_file(str(data.tokenizer)).get_vocab() != tokenizer.get_vocab():
        raise RequestError(
            f"data.tokenizer {data.tokenizer} is not the one of {source.path}, whose weights know its tokens alone; "
            f"leave it out"
        )
    return config


def _with_tokenizer(config: Config, tokenizer: Path | None) -> Config:
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": tokenizer})})


def environment(devices: list[str], asked: Mapping[str, object]) -> dict[str, object]:
    """Versions, code and machine, as far as they can change a result."""
    return {
        "jaxdist": __version__,
        "git_revision": _git_revision(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "devices": devices,
        **asked,
        "command": sys.argv,
    }


def _git_revision() -> str | None:
    """The revision of the code that runs; None outside a checkout, `-dirty` where files differ from it."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _replace(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def _value(config: Config, name: str) -> object:
    value = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def differing(old: Config, new: Config) -> list[str]:
    """Dotted names of the knobs that differ and must not when a run goes on."""
    also = () if new.model.images else ("train.accumulation",)  # batch norm takes the statistics of a micro-batch
    free = lambda name: name in (*FREE_ON_RESUME, *also) or name.split(".")[0] in FREE_ON_RESUME
    old_leaves, new_leaves = leaves(old), leaves(new)
    return [name for name, value in new_leaves.items() if old_leaves[name] != value and not free(name)]
