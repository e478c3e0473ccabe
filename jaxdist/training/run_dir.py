"""The folder of a run: which files it holds, and whether a run may start or resume there.

No symbolic link in it is followed: the folder may come from somebody else, and a link would redirect what is written,
or removed. The run folder itself may be a link.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from jaxdist import __version__
from jaxdist.config import Config, ModelConfig, RequestError
from jaxdist.files import WRONG_CONTENT, write_whole
from jaxdist.files.json_files import LARGEST_LISTING, read_text
from jaxdist.huggingface import special_tokens
from jaxdist.huggingface.folder import KEPT
from jaxdist.huggingface.given_tokenizer import load_tokenizer
from jaxdist.huggingface.schema import KEPT_TOKENS, SMALL_FILES, SOURCE
from jaxdist.huggingface.special_tokens import SpecialTokens
from jaxdist.output.streams import clock
from jaxdist.request import load, to_toml
from jaxdist.request.pretrained import as_asked
from jaxdist.training import history
from jaxdist.training.checkpoint.step_dir import STEP, StepDir
from jaxdist.training.resume_check import differing, lengthened, refusal, with_warmup
from jaxdist.training.run_facts import FILE, SAVED, run_facts, run_id
from jaxdist.training.run_lock import LIMIT, RunLock
from jaxdist.training.saved_before import what_shows_a_save
from jaxdist.weights.source import begun_with, source_of

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
"""Packages whose versions are written down."""

FILES = (
    "config.toml",
    "environment.json",
    "tokenizer.json",
    KEPT_TOKENS,
    "metrics.jsonl",
    "run.json",
    "loss.png",
    "log.txt",
    "log.txt.1",
    *(f"{KEPT}/{name}" for name in (*SMALL_FILES, SOURCE)),
)
"""Files that jaxdist reads and writes in the folder of a run, beside the steps in the `STEP_DIRS`."""

STEP_DIRS = ("checkpoints", "checkpoints/best", "checkpoints/aside", "checkpoints/aside/best")
"""Folders that hold steps, each with a folder `sums` for their seals."""

FOLDERS = (
    "checkpoints",
    "heartbeats",
    "slurm",
    KEPT,
    "tensorboard",
    "profile",
    "wandb",
    *STEP_DIRS[1:],
    *(f"{name}/sums" for name in STEP_DIRS),
)
"""Folders that jaxdist reads and writes in the folder of a run."""

BEFORE_A_RUN = {".lock", "checkpoints", "heartbeats", KEPT, "slurm", "run.json", "log.txt", "log.txt.1"}
"""Names that may exist in a folder in which no run has begun yet, or one was killed as it began."""

LISTED = 3
"""Unexpected names that an error lists at most."""


class RunFolder:
    """Paths of a run's files, and the rules for entering the folder."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.environment = self.path / "environment.json"
        self.tokenizer = self.path / "tokenizer.json"
        self.special_tokens = self.path / KEPT_TOKENS
        self.metrics = self.path / "metrics.jsonl"
        self.run = self.path / FILE
        self.log = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.heartbeats = self.path / "heartbeats"
        self.plot = self.path / "loss.png"
        self.tensorboard = self.path / "tensorboard"
        self.notes: list[str] = []
        """Sentences about how the run that is here is resumed, from `enter`."""

    def enter(self, config: Config) -> Config:
        """Return the configuration to run here: `config`, completed from the run that is here.

        That run gives its precision where `config` leaves it open, and the run whose weights `config` begins with gives
        its tokenizer. Raises `RequestError` when `config` must not be run here. Writes nothing.
        """
        self.check_layout()
        committed = [step for folder in self._step_dirs() for step in folder.steps()]
        if not self.config.exists():
            self._check_new(config, committed)
            return source_of(config.init_from).inherit(config)
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
            # The run died before it had learned anything that could be kept, or that is not where it was.
            self._refuse_lost(load(str(self.config), {}, knobs=()))
            return source_of(config.init_from).inherit(config)
        return self._continuing(config, steps or committed)

    def check_beginning(self, config: Config) -> None:
        """Refuse an `init_from` as `enter` does, for a run that is only described: no weights need be in a folder.

        A run that has saved a step here needs what it began with no more. Raises `RequestError`.
        """
        begun = self.config.exists() and any(folder.steps() for folder in self._step_dirs())
        if not begun:
            begun_with(config.init_from, self.path).check_beginning(config)

    def _check_new(self, config: Config, committed: list[int]) -> None:
        """Raise `RequestError` where a folder without a config.toml is not fit for a new run."""
        if committed:
            raise RequestError(
                f"run folder {self.path} holds checkpoints but not the config.toml of their run; copy it there, or "
                f"name another --run-dir"
            )
        self._refuse_lost(None)
        names = os.listdir(self.path) if self.path.exists() else []
        strangers = sorted(set(names) - BEFORE_A_RUN)
        if strangers:
            raise RequestError(
                f"run folder {self.path} holds no run, but other things ({', '.join(strangers[:LISTED])}); "
                f"name another --run-dir"
            )
        if config.resume.isdecimal():
            raise RequestError(f"run folder {self.path} holds no run to go back to step {config.resume} of")

    def _refuse_lost(self, config: Config | None) -> None:
        """Raise `RequestError` if the run here, which has no step, has ever saved one; `config` is its own."""
        seals = [step for folder in self._step_dirs() for step in folder.seals()]
        shown = what_shows_a_save(self.path, seals, config)
        if shown:
            raise RequestError(
                f"run folder {self.path} holds no step of its run, but {shown}; bring {self.checkpoints} back (a "
                f"volume may not be mounted), or name another --run-dir, or move {self.path} away to start from the "
                f"beginning"
            )

    def lost_step(self, first: int) -> list[str]:
        """Return a sentence about the step that was saved last, where it is gone and the run goes on from `first`."""
        step = run_facts(self.path).get(SAVED)
        if not isinstance(step, int) or step <= first or any(step in folder.steps() for folder in self._step_dirs()):
            return []
        return [f"step {step} was saved, but is gone: the steps after {first} are taken again"]

    def _continuing(self, config: Config, steps: list[int]) -> Config:
        """Return `config` as it continues the run here, which has saved `steps`. Raises `RequestError`."""
        old = load(str(self.config), {}, knobs=())
        if config.precision == "auto":
            config = config.model_copy(update={"precision": old.precision})
        if config.init_from and not config.data.tokenizer:
            config = with_tokenizer(config, old.data.tokenizer)
        from_step = int(config.resume) if config.resume.isdecimal() else max(steps)
        asked = as_asked(config)
        longer = lengthened(old, asked, from_step)
        if longer:
            self.notes.append(longer)
            return with_warmup(config, old.optimizer.warmup)
        if differing(old, asked):
            raise RequestError(f"run folder {self.path} holds a run with another config: {refusal(old, asked)}")
        return config

    def model(self) -> ModelConfig:
        """Return the model of the run here."""
        return load(str(self.config), {}, knobs=()).model

    def check_layout(self) -> None:
        """Raise `RequestError` where a file or a folder of a run is something else, such as a link."""
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
        """Yield each name within the folder, and what it must be if it exists."""
        for name in FILES:
            yield name, "file"
        for name in FOLDERS:
            yield name, "folder"
        for folder in STEP_DIRS:
            for name in _listed(self.path / folder):
                if STEP.fullmatch(name):
                    yield f"{folder}/{name}", "folder"
            for seal in _listed(self.path / folder / "sums"):
                yield f"{folder}/sums/{seal}", "file"

    def identity(self) -> str | None:
        """Return the random id of the run; None where it has none, or none that can be read."""
        return run_id(self.path)

    def identify(self) -> None:
        """Give the run an id, if it has none: the one in the seals of its steps, where run.json was lost, or a new one.

        By the id a checkpoint that was copied here from another run is recognized. Raises `RequestError`.
        """
        if self.identity() is not None:
            return
        identity = self._identity_of_seals() or secrets.token_hex(16)
        try:
            write_whole(self.run, json.dumps({"id": identity, "created": clock()}) + "\n")
        except OSError as error:
            raise RequestError(f"run folder {self.path} cannot be written ({error.strerror}); name another") from error

    def _identity_of_seals(self) -> str | None:
        """Return the id of the run that sealed the steps here, if a seal names one."""
        for folder in self._step_dirs():
            for step in reversed(folder.steps()):
                seal = folder.seal_of(step)
                if seal and seal.run:
                    return seal.run
        return None

    def _step_dirs(self) -> list[StepDir]:
        """Return the folders of steps of this run: the newest, the best, and those set aside."""
        return [StepDir(self.path / name) for name in STEP_DIRS]

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

    def data_begun(self) -> str | None:
        """Return the fingerprint of the data that the run here began with; None where no step tells it."""
        for folder in self._step_dirs():
            for step in reversed(folder.steps()):
                with suppress(*WRONG_CONTENT):
                    return str(folder.facts(step)["data"])
        return None

    def same_data(self, there: str, here: str) -> None:
        """Raise `RequestError` if the run here was trained on other data: `there` and `here` are fingerprints."""
        if there != here:
            raise RequestError(
                f"the training data is not what the run in {self.path} has seen so far (fingerprint {here[:12]} here, "
                f"{there[:12]} there); put it back, or name another --run-dir"
            )

    def load_tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the run. Raises `RequestError` if its data came as tokens."""
        if not self.tokenizer.is_file():
            raise RequestError(
                f"{self.path} has no tokenizer.json: the run was trained on tokens; copy their tokenizer there"
            )
        text = read_text(self.tokenizer, LARGEST_LISTING, links=False)
        try:
            tokenizer = load_tokenizer(text)
        except ValueError as error:
            raise RequestError(f"{self.tokenizer} is not a tokenizer ({error}); copy the right one there") from error
        return tokenizer

    def load_special_tokens(self, tokenizer: Tokenizer) -> SpecialTokens:
        """Return the special tokens of the run, whose `tokenizer` has been loaded. Raises `RequestError`."""
        if self.special_tokens.is_file():
            return special_tokens.from_json(self.special_tokens, tokenizer)
        return special_tokens.special_tokens_of(tokenizer)

    @property
    def tokenizer_source(self) -> Path:
        """What data.tokenizer must name to encode text as this run does: the folder, where it keeps special tokens."""
        if self.special_tokens.is_file() and self.tokenizer.is_file():
            return self.path
        return self.tokenizer

    def write(
        self,
        config: Config,
        tokenizer: str | None,
        special: SpecialTokens | None,
        devices: list[str],
        more: Mapping[str, object],
    ) -> None:
        """Write how the run was made: its configuration, tokenizer and environment, of which `more` are entries."""
        self.path.mkdir(parents=True, exist_ok=True)
        # The choice of --resume holds for one start only.
        write_whole(self.config, to_toml(as_asked(config).model_copy(update={"resume": "auto"})))
        write_whole(self.environment, json.dumps(environment(devices, more), indent=2) + "\n")
        if tokenizer is not None:
            write_whole(self.tokenizer, tokenizer)
            self._write_special_tokens(tokenizer, special)

    def _write_special_tokens(self, tokenizer: str, special: SpecialTokens | None) -> None:
        """Write what the tokenizer alone does not say, if anything."""
        if special is None or special == special_tokens.special_tokens_of(load_tokenizer(tokenizer)):
            # A run that ended before its first checkpoint may have left another one's.
            self.special_tokens.unlink(missing_ok=True)
        else:
            write_whole(self.special_tokens, special_tokens.to_json(special))

    def cut_metrics(self, step: int, config: Config) -> list[str]:
        """Leave each step up to `step` once in metrics.jsonl; call it before `write`. `config` holds from now on.

        Returns sentences about lines that are damaged or missing. Raises `RequestError` where it cannot be written.
        """
        before = load(str(self.config), {}, knobs=()) if self.config.exists() else config
        try:
            return history.cut(self.metrics, step, [history.interval(one) for one in (before, config)])
        except OSError as error:
            raise RequestError(
                f"{self.metrics} cannot be read and written ({error.strerror or error}); make it so, or move it away"
            ) from error


def with_tokenizer(config: Config, tokenizer: Path | None) -> Config:
    """Return `config` with this data.tokenizer."""
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": tokenizer})})


def environment(devices: list[str], more: Mapping[str, object]) -> dict[str, object]:
    """Return when and where a run began or was resumed, and versions, code and machine that can change a result."""
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
        **more,
        "command": sys.argv,
    }


def _git_revision() -> str | None:
    """Return the git revision of the code, `-dirty` where files differ from it; None outside a checkout."""
    try:
        command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _listed(folder: Path) -> list[str]:
    """Return the names in a folder; none for a link, or where it is not a folder."""
    try:
        if folder.is_symlink():
            return []
        return os.listdir(folder)
    except OSError:
        return []


def _not_a(kind: Literal["file", "folder"], path: Path) -> str | None:
    """Return what is at `path` instead of a file or folder; None where it is one, or nothing exists."""
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
