"""The folder of a run: which files it holds, and how they are read and written.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from jaxdist import __version__
from jaxdist.config import Config, RequestError
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
from jaxdist.training.run_facts import FILE, run_id
from jaxdist.training.run_lock import LIMIT, RunLock

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
"""Packages whose versions are written down."""

FILES = (
    "config.toml",
    "environment.json",
    "tokenizer.json",
    KEPT_TOKENS,
    "metrics.jsonl",
    "starts.jsonl",
    "run.json",
    "loss.png",
    "log.txt",
    "log.txt.1",
    *(f"{KEPT}/{name}" for name in (*SMALL_FILES, SOURCE)),
)
"""Files that jaxdist reads and writes in the folder of a run, beside the steps in the `STEP_DIRS`."""

STEP_DIRS = {
    "checkpoints": "newest",
    "checkpoints/best": "best",
    "checkpoints/aside": "aside",
    "checkpoints/aside/best": "aside",
}
"""Folders that hold steps, each with a folder `sums` for their seals, and the kind of the steps in them."""

FOLDERS = (
    *STEP_DIRS,
    "heartbeats",
    "slurm",
    KEPT,
    "tensorboard",
    "profile",
    "wandb",
    *(f"{name}/sums" for name in STEP_DIRS),
)
"""Folders that jaxdist reads and writes in the folder of a run."""


class RunFolder:
    """Paths of a run's files, and what they hold."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.config = self.path / "config.toml"
        self.environment = self.path / "environment.json"
        self.tokenizer = self.path / "tokenizer.json"
        self.special_tokens = self.path / KEPT_TOKENS
        self.metrics = self.path / "metrics.jsonl"
        self.starts = self.path / "starts.jsonl"
        self.run = self.path / FILE
        self.log = self.path / "log.txt"
        self.checkpoints = self.path / "checkpoints"
        self.heartbeats = self.path / "heartbeats"
        self.plot = self.path / "loss.png"
        self.tensorboard = self.path / "tensorboard"
        self.notes: list[str] = []
        """Sentences about how the run that is here is resumed, from `entering.enter`."""

    def own_config(self) -> Config:
        """Return the configuration of the run here."""
        return load(str(self.config), {}, knobs=())

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
        for folder in self.step_dirs():
            for step in reversed(folder.steps()):
                seal = folder.seal_of(step)
                if seal and seal.run:
                    return seal.run
        return None

    def step_dirs(self) -> list[StepDir]:
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

    def newest_facts(self) -> dict[str, Any]:
        """Return the facts of the newest step that can be read, such as its data; nothing where there is none."""
        for folder in self.step_dirs():
            for step in reversed(folder.steps()):
                with suppress(*WRONG_CONTENT):
                    facts = folder.facts(step)
                    if "data" in facts:
                        return facts
        return {}

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
        # These choices hold for one start only.
        once = {"resume": "auto", "data.changed": False}
        write_whole(self.config, to_toml(as_asked(config).with_knobs(once)))
        self.write_environment(devices, more)
        if tokenizer is not None:
            write_whole(self.tokenizer, tokenizer)
            self._write_special_tokens(tokenizer, special)

    def write_environment(self, devices: list[str], more: Mapping[str, object]) -> None:
        """Write versions, code and machine, of which `more` are entries."""
        write_whole(self.environment, json.dumps(environment(devices, more), indent=2) + "\n")

    def _write_special_tokens(self, tokenizer: str, special: SpecialTokens | None) -> None:
        """Write what the tokenizer alone does not say, if anything."""
        if special is None or special == special_tokens.special_tokens_of(load_tokenizer(tokenizer)):
            # A run that ended before its first checkpoint may have left another one's.
            self.special_tokens.unlink(missing_ok=True)
        else:
            write_whole(self.special_tokens, special_tokens.to_json(special))

    def cut_metrics(self, step: int, intervals: Sequence[int]) -> list[str]:
        """Leave each step up to `step` once in metrics.jsonl; `intervals` are steps between lines, before and now.

        Returns sentences about lines that are damaged or missing. Raises `RequestError` where it cannot be written.
        """
        try:
            return history.cut(self.metrics, step, intervals)
        except OSError as error:
            raise RequestError(
                f"{self.metrics} cannot be read and written ({error.strerror or error}); make it so, or move it away"
            ) from error


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
