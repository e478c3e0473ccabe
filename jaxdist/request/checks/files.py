"""Check files, folders and packages of this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxdist.config import Config, DataConfig, RequestError
from jaxdist.data.naming.training_paths import training_tokens
from jaxdist.files.reasons import reason
from jaxdist.request.checks.registry import check
from jaxdist.weights.named import model_folder, needs_tokenizer

BYTE_LEVEL_VOCAB = 257
"""Fewest entries of a byte-level tokenizer: one for each byte, and the end-of-text token."""


OF_ROWS = ("text", "on_error", "form", "learn", "long")
"""Knobs of `data` that only some data use."""


@check(
    "model.family",
    "data.path",
    "data.mixture",
    "data.tokenizer",
    "data.validation_path",
    "data.text",
    "data.on_error",
    "data.form",
    "data.learn",
    "data.long",
)
def _files(config: Config) -> Iterator[str]:
    data = config.data
    named = any((data.path, data.mixture, data.tokenizer, data.validation_path))
    default = DataConfig()
    # Images are checked when they are opened.
    if config.model.images or not (named or any(getattr(data, knob) != getattr(default, knob) for knob in OF_ROWS)):
        return

    # This module reads only the first bytes of the files, and does not import numpy.
    from jaxdist.data.naming.paths import open_mixture, open_sources

    try:
        if data.mixture:
            open_mixture(data)
        else:
            open_sources(data)
    except RequestError as error:
        yield from error.problems


@check("model.family", "data.mixture", "data.validation_path")
def _mixture(config: Config) -> Iterator[str]:
    data = config.data
    if data.mixture and data.validation_path:
        yield (
            f"data.validation_path is '{data.validation_path}', but each source of data.mixture holds out a part "
            "of its own; leave it out, and give it to evaluate"
        )


@check("data.mixture", "train.steps", "train.epochs", "checkpoint.epochs")
def _length_of_mixture(config: Config) -> Iterator[str]:
    mixture = config.data.mixture
    if mixture is None:
        return
    if config.train.epochs:
        yield (
            f"train.epochs is {config.train.epochs:g}, but the sources of data.mixture have epochs of their own; set "
            "train.steps"
        )
    else:
        yield from mixture.problems(config.train.steps)
    if config.checkpoint.epochs:
        yield (
            "checkpoint.epochs is true, but the sources of data.mixture have epochs of their own; set checkpoint.every"
        )


@check("model.family", "model.documents", "data.path", "data.mixture", "data.tokenizer")
def _documents(config: Config) -> Iterator[str]:
    data = config.data
    tokens = training_tokens(data)
    if config.model.documents_apart and not data.tokenizer and tokens:
        yield (
            f"model.documents is apart, but nothing says which token of '{tokens}' ends a document; give its "
            "data.tokenizer, or set model.documents to joined"
        )


@check("model.family", "data.pack", "data.path", "data.mixture", "data.tokenizer")
def _packing(config: Config) -> Iterator[str]:
    data = config.data
    tokens = training_tokens(data)
    if not config.model.images and data.pack == "best-fit" and not data.tokenizer and tokens:
        yield (
            f"data.pack is best-fit, but nothing says which token of '{tokens}' ends a document; give its "
            "data.tokenizer, or set data.pack to cut"
        )


@check("model.family", "model.vocab", "data.path", "data.mixture", "data.tokenizer")
def _vocab(config: Config) -> Iterator[str]:
    if config.model.images:
        return
    if not _trains_tokenizer(config):
        return
    problem = needs_tokenizer(config.init_from)
    if problem:
        yield problem
    elif config.model.vocab < BYTE_LEVEL_VOCAB:
        yield (
            f"model.vocab {config.model.vocab} is too small for the byte-level tokenizer that is trained on text; "
            f"set it to {BYTE_LEVEL_VOCAB} or more, or give a data.tokenizer"
        )


def _trains_tokenizer(config: Config) -> bool:
    return not config.data.tokenizer and not training_tokens(config.data)


@check("run_dir")
def _run_dir(config: Config) -> Iterator[str]:
    folder = config.folder
    problem = path_problem(folder)
    if problem:
        yield f"run_dir '{folder}' {problem}; name another --run-dir"
        return
    path = Path(folder).absolute()
    # The folder itself may not exist yet.
    existing = next(ancestor for ancestor in (path, *path.parents) if os.path.lexists(ancestor))
    if not existing.is_dir():
        yield f"run_dir '{folder}' cannot be a folder, because '{existing}' is a file; name another --run-dir"
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield f"run_dir '{folder}' cannot be written: no permission in '{existing}'; name another --run-dir"


@check("init_from")
def _init_from(config: Config) -> Iterator[str]:
    if config.init_from is None or model_folder(config.init_from):
        return
    problem = path_problem(config.init_from)
    if problem:
        yield f"init_from '{config.init_from}' {problem}; move or rename the folder"


def path_problem(folder: Path) -> str | None:
    """Return why checkpoints cannot be stored in `folder`, or None if they can.

    The full path from the root counts, with links resolved.
    """
    path = Path(folder).resolve()
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        return "is not UTF-8, which checkpoints need"
    # TensorStore reads a backslash as a slash. Orbax reads `gs:/` as a bucket, and brackets, `*` and `?` as patterns.
    # Arrays would be written to one folder and read from another.
    special = sorted(set(str(path)) & set("\\[]*?"))
    if special:
        return f"has a '{special[0]}' in its full path ({path}), with which checkpoints would be written elsewhere"
    if any(part.endswith(":") for part in path.parts):
        return f"has a folder whose name ends with a colon in its full path ({path}), which stands for a bucket"
    return None


@check("log.wandb")
def _wandb(config: Config) -> Iterator[str]:
    if config.log.wandb:
        package = importlib.util.find_spec("wandb")
        # Without an origin it is the folder `wandb` that the package leaves in the working directory.
        if package is None or package.origin is None:
            yield (
                f"log.wandb is '{config.log.wandb}', but the package wandb is not installed; "
                f"run pip install 'jaxdist[wandb]', or leave log.wandb empty"
            )


def check_picture(path: str, example: str) -> None:
    """Check the path of a picture as `check_output` does; it must be a PNG file. An empty path is skipped."""
    if not path:
        return
    check_output("picture", path, example)
    if Path(path).suffix != ".png":
        raise RequestError(f"picture '{path}' would be a PNG file; name it {Path(path).with_suffix('.png')}")


def check_output(what: str, path: str | Path, example: str) -> None:
    """Raise `RequestError` if `what` cannot be written to `path`, before the work that produces it.

    `example` is a good name for the file; an empty path is skipped. A regular file may be replaced, but not one that
    belongs to a run.
    """
    if not str(path):
        return
    output = f"{what} '{path}'"
    try:
        _check_regular(output, Path(path), example)
        _check_folder(output, Path(path).absolute().parent)
        _check_no_run(output, Path(path))
    except OSError as error:
        # For example, the name may be too long.
        raise RequestError(f"{output} cannot be written: {reason(error)}; name another file") from error


def means_folder(target: str) -> bool:
    """Return whether the text of an option means a folder: one that is there, or a name that ends with a slash."""
    return target.endswith("/") or os.path.isdir(target)


def check_output_folder(what: str, path: Path) -> None:
    """Raise `RequestError` if `what` cannot write the folder `path`, before the work that produces its files.

    It must be new, or a folder that another can take the place of, and not be, or belong to, a run.
    """
    output = f"{what} '{path}'"
    try:
        if path.is_symlink():
            raise RequestError(f"{output} is a symbolic link; name the folder itself")
        full = Path(os.path.abspath(path))
        here = Path.cwd()
        if full in (here, *here.parents):
            raise RequestError(
                f"{output} is, or holds, the folder in which the command runs; name a new folder in it, such as "
                f"{full / 'exported'}/"
            )
        _check_folder(output, full.parent)
        _check_no_run(output, full)
        if not os.path.lexists(full):
            return
        if not full.is_dir():
            raise RequestError(f"{output} is not a folder; name one that is empty, or new")
        if _is_mount(full):
            raise RequestError(
                f"{output} is a mount point, which no other folder can replace; name a new folder in it, such as "
                f"{full / 'exported'}/"
            )
    except OSError as error:
        raise RequestError(f"{output} cannot be written: {reason(error)}; name another folder") from error


def _check_regular(output: str, path: Path, example: str) -> None:
    # Opening a FIFO would wait forever, and replacing a link would leave the file that it names unchanged.
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if path.is_dir():
        raise RequestError(f"{output} is a folder; name a file in it, such as {path}/{example}")
    if stat.S_ISLNK(mode):
        raise RequestError(f"{output} is a symbolic link; name the file itself")
    if not stat.S_ISREG(mode):
        raise RequestError(f"{output} is a device, a FIFO or a socket; name a regular file")
    if _is_mount(path):
        raise RequestError(f"{output} is a mount point, which no other file can replace; name another file")


def _is_mount(path: Path) -> bool:
    """Return whether something is mounted at `path`, perhaps from elsewhere in the same file system."""
    if os.path.ismount(path):
        return True
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    real = os.path.realpath(path)
    return any(_without_escapes(line.split(" ")[4]) == real for line in mounts)


def _without_escapes(text: str) -> str:
    """Return a path of mountinfo as it is: spaces and the like are octal numbers there."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _check_folder(output: str, folder: Path) -> None:
    if not folder.is_dir():
        raise RequestError(f"{output} cannot be written: its folder does not exist; create it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError(f"{output} cannot be written: no permission in '{folder}'; name another file")


OF_A_RUN = frozenset(
    [
        "config.toml",
        "environment.json",
        "run.json",
        "tokenizer.json",
        "special_tokens.json",
        "metrics.jsonl",
        "starts.jsonl",
        "log.txt",
        "log.txt.1",
        "loss.png",
        ".lock",
        "checkpoints",
        "heartbeats",
        "huggingface",
        "profile",
        "slurm",
        "tensorboard",
        "wandb",
    ]
)
"""Files and folders that a run writes into its own folder."""


def _check_no_run(output: str, path: Path) -> None:
    """Raise `RequestError` if a run writes `path`, or a folder that contains it, itself."""
    parent = path.absolute().parent.resolve()
    for folder in (parent, *parent.parents):
        name = (parent / path.name).relative_to(folder).parts[0]
        if name in OF_A_RUN and _is_run(folder):
            raise RequestError(
                f"{output} belongs to the run in '{folder}', which writes {name} itself; name another file"
            )


def _is_run(folder: Path) -> bool:
    # A config.toml alone may be a user's own; these are written only by a run.
    others = (".lock", "environment.json", "checkpoints")
    return (folder / "config.toml").is_file() and any((folder / name).exists() for name in others)
