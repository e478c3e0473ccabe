"""The folder of a run: what lies in it, and whether a run may start, resume, or is already done there.

No symbolic link in it is followed: it may come from somebody else, and a link would lead what is written, or removed,
elsewhere. The run folder itself may be a link.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from jaxdist import __version__
from jaxdist.config import Config, RequestError
from jaxdist.files import read_regular, write_whole
from jaxdist.request import load, to_toml
from jaxdist.streams import clock
from jaxdist.training import history
from jaxdist.training.checkpoint.step_dir import STEP, WRONG_CONTENT, StepDir
from jaxdist.training.resume_check import differing, lengthened, refusal, with_warmup
from jaxdist.training.run_lock import LIMIT, RunLock

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

FILES = ("config.toml", "environment.json", "tokenizer.json", "metrics.jsonl", "run.json", "loss.png")
FILES += ("log.txt", "log.txt.1")
FOLDERS = ("checkpoints", "heartbeats", "slurm", "tensorboard", "profile", "wandb")
SHELVES = ("checkpoints", "checkpoints/best", "checkpoints/aside", "checkpoints/aside/best")
FOLDERS += (*SHELVES[1:], *(f"{shelf}/sums" for shelf in SHELVES))
"""What jaxdist reads and writes in the folder of a run, beside the steps in `checkpoints`."""

BEFORE_A_RUN = {".lock", "checkpoints", "heartbeats", "slurm", "run.json", "log.txt", "log.txt.1"}
"""What may lie in a folder in which no run has begun yet, or one was killed as it began."""


class RunFolder:
    """Paths of a run's files, and the rules for entering the folder."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.environment = self.path / "environment.json"
        self.tokenizer = self.path / "tokenizer.json"
        self.metrics = self.path / "metrics.jsonl"
        self.run = self.path / "run.json"
        self.log = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.heartbeats = self.path / "heartbeats"
        self.plot = self.path / "loss.png"
        self.tensorboard = self.path / "tensorboard"
        self.notes: list[str] = []
        """Sentences about how the run that is here goes on, from `enter`."""

    def enter(self, config: Config) -> Config:
        """What to run here: `config`, with the precision of the run that is here where it leaves that open, and the
        tokenizer that belongs to the weights that it begins with.

        Raises `RequestError` when `config` must not be run here. Writes nothing.
        """
        self.check_layout()
        committed = [step for shelf in self._shelves() for step in shelf.steps()]
        if not self.config.exists():
            if committed:
                raise RequestError(
                    f"run folder {self.path} holds checkpoints but not the config.toml of their run; copy it there, or "
                    f"name another --run-dir"
                )
            there = os.listdir(self.path) if self.path.exists() else []
            strangers = set(there) - BEFORE_A_RUN
            if strangers:
                raise RequestError(
                    f"run folder {self.path} holds no run, but other things ({', '.join(sorted(strangers)[:3])}); "
                    f"name another --run-dir"
                )
            if config.resume.isdecimal():
                raise RequestError(f"run folder {self.path} holds no run to go back to step {config.resume} of")
            return inheriting(config)
        if config.resume == "never":
            raise RequestError(
                f"run folder {self.path} holds a run already and --resume is never; "
                f"name another --run-dir, or go on with --resume auto"
            )
        steps = StepDir(self.checkpoints).steps()
        if config.resume.isdecimal() and int(config.resume) not in steps:
            there = f"its steps are {', '.join(map(str, steps))}" if steps else "it holds none"
            raise RequestError(f"run folder {self.path} holds no checkpoint of step {config.resume}; {there}")
        if not committed:
            return inheriting(config)  # it died before it had learned anything that could be kept
        old = load(str(self.config), {}, knobs=())
        if config.precision == "auto":
            config = config.model_copy(update={"precision": old.precision})
        if config.init_from and not config.data.tokenizer:
            config = _with_tokenizer(config, old.data.tokenizer)
        from_step = int(config.resume) if config.resume.isdecimal() else max(steps or committed)
        if told := lengthened(old, config, from_step):
            self.notes.append(told)
            return with_warmup(config, old.optimizer.warmup)
        if differing(old, config):
            raise RequestError(f"run folder {self.path} holds a run with another config: {refusal(old, config)}")
        return config

    def check_layout(self) -> None:
        """Raise `RequestError` where something else stands in the place of a file or a folder of a run, a link too."""
        problems = []
        for name, kind in self._layout():
            problem = _not_a(kind, self.path / name)
            if problem:
                problems.append(f"{name} is {problem}, not a {kind}")
        if problems:
            raise RequestError(
                f"run folder {self.path} cannot be used: {', '.join(problems)}; no link is followed there; put the "
                f"files and folders themselves in their place, or name another run folder"
            )

    def _layout(self) -> Iterator[tuple[str, Literal["file", "folder"]]]:
        """What each name within the folder must be, if it is there."""
        for name in FILES:
            yield name, "file"
        for name in FOLDERS:
            yield name, "folder"
        for shelf in SHELVES:
            for step in filter(STEP.fullmatch, _listed(self.path / shelf)):
                yield f"{shelf}/{step}", "folder"
            for seal in _listed(self.path / shelf / "sums"):
                yield f"{shelf}/sums/{seal}", "file"

    def identity(self) -> str | None:
        """The random id of the run; None where it has none, or none that can be read."""
        found = self._run_facts().get("id")
        return found if isinstance(found, str) else None

    def wandb_id(self) -> str:
        """The id of the run at Weights & Biases, made when it is first asked for. Raises `OSError`."""
        facts = self._run_facts()
        found = facts.get("wandb")
        if isinstance(found, str) and re.fullmatch("[A-Za-z0-9_-]{1,64}", found):
            return found
        facts["wandb"] = secrets.token_hex(8)
        write_whole(self.run, json.dumps(facts) + "\n")
        return facts["wandb"]

    def _run_facts(self) -> dict[str, Any]:
        """What run.json holds; nothing where it is not there, or damaged."""
        try:
            facts = json.loads(read_regular(self.run))
        except WRONG_CONTENT:
            return {}
        return facts if isinstance(facts, dict) else {}

    def identify(self) -> None:
        """Give the run an id, if it has none: the one in the seals of its steps, where run.json was lost, or a new one.

        A checkpoint that was copied here from another run is known by it. Raises `RequestError`.
        """
        if self.identity() is not None:
            return
        seals = (shelf.seal_of(step) for shelf in self._shelves() for step in reversed(shelf.steps()))
        found = next((seal.run for seal in seals if seal and seal.run), None) or secrets.token_hex(16)
        now = clock()
        try:
            write_whole(self.run, json.dumps({"id": found, "created": now}) + "\n")
        except OSError as error:
            raise RequestError(f"run folder {self.path} cannot be written ({error.strerror}); name another") from error

    def _shelves(self) -> list[StepDir]:
        """Where steps of this run may lie: the newest, the best, and those set aside."""
        return [StepDir(self.path / name) for name in SHELVES]

    @contextmanager
    def locked(self, limit: float = LIMIT) -> Iterator[RunLock]:
        """Make the folder and keep other processes from training in it (`RunLock`).

        Raises `Busy` while one does, and `RequestError` where the folder cannot be written.
        """
        with ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(RunLock(self.path, self.heartbeats, limit))
            except OSError as error:
                raise RequestError(
                    f"run folder {self.path} cannot be written ({error.strerror}); name another"
                ) from error
            yield lock

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
        write_whole(self.config, to_toml(config.model_copy(update={"resume": "auto"})))  # how to enter is not kept
        write_whole(self.environment, json.dumps(environment(devices, asked), indent=2) + "\n")
        if tokenizer is not None:
            write_whole(self.tokenizer, tokenizer)

    def cut_metrics(self, step: int, every: int) -> list[str]:
        """Leave each step up to `step` once in metrics.jsonl; call it before `write`. `every`: `log.every` from now on.

        Returns sentences about lines that are damaged or missing. Raises `RequestError` where it cannot be written.
        """
        before = load(str(self.config), {}, knobs=()).log.every if self.config.exists() else every
        try:
            return history.cut(self.metrics, step, (before, every))
        except OSError as error:
            raise RequestError(
                f"{self.metrics} cannot be read and written ({error.strerror or error}); make it so, or move it away"
            ) from error


def checkpoint_of(path: Path) -> tuple[RunFolder, str]:
    """The run, and which of its checkpoints, that `--init-from` names. Raises `RequestError` if it names none."""
    for folder, which in (path, "latest"), (path.parent.parent, path.name):
        if RunFolder(folder).config.is_file() and (which == "latest" or path.parent.name == "checkpoints"):
            RunFolder(folder).check_layout()
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
    """When and where a run began, or went on, and versions, code and machine as far as they can change a result."""
    return {
        "start": clock(),
        "host": platform.node(),
        "job": os.environ.get("SLURM_JOB_ID"),
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


def _listed(folder: Path) -> list[str]:
    """The names in a folder; none where it is no folder itself."""
    try:
        return os.listdir(folder) if not folder.is_symlink() else []
    except OSError:
        return []


def _not_a(kind: Literal["file", "folder"], path: Path) -> str | None:
    """What stands at `path` in the place of a file or folder; None where it is one, or nothing is there."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return None
    if stat.S_ISLNK(mode):
        return f"a symbolic link to {os.readlink(path)}"
    if stat.S_ISDIR(mode):
        return None if kind == "folder" else "a folder"
    if stat.S_ISREG(mode):
        return None if kind == "file" else "a file"
    return "a FIFO, a socket or a device"
