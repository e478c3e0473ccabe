"""Files, folders and packages of this machine."""

from __future__ import annotations

import importlib.util
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxdist.config import Config, RequestError
from jaxdist.request.checks.registry import check, unused

BYTE_LEVEL_VOCAB = 257
"""Entries that a byte-level tokenizer cannot do without: a byte each, and the end of a text."""


@check("data.validation_path", "data.validation_fraction")
def _validation_fraction(config: Config) -> Iterator[str]:
    if config.data.validation_path:
        yield from unused(config, "data.validation_fraction", "a data.validation_path")


@check("model.family", "data.path", "data.tokenizer", "data.validation_path")
def _files(config: Config) -> Iterator[str]:
    if config.model.images or not (config.data.path or config.data.tokenizer or config.data.validation_path):
        return  # images are looked at when they are opened
    from jaxdist.data.documents import open_sources  # reads no content, and needs no numpy

    try:
        open_sources(config.data)
    except RequestError as error:
        yield from error.problems


@check("model.family", "model.documents", "data.path", "data.tokenizer")
def _documents(config: Config) -> Iterator[str]:
    data = config.data
    if config.model.documents == "apart" and not data.tokenizer and data.path and data.path.suffix.lower() == ".bin":
        yield (
            f"model.documents is apart, but nothing tells which token of '{data.path}' ends a document; give its "
            "data.tokenizer, or set model.documents to joined"
        )


@check("model.family", "model.vocab", "data.path", "data.tokenizer")
def _vocab(config: Config) -> Iterator[str]:
    if config.model.images:
        return
    trains = not config.data.tokenizer and (config.data.path is None or config.data.path.suffix.lower() != ".bin")
    if trains and config.model.vocab < BYTE_LEVEL_VOCAB:
        yield (
            f"model.vocab {config.model.vocab} is too small for the byte-level tokenizer that is trained on text; "
            f"set it to {BYTE_LEVEL_VOCAB} or more, or give a data.tokenizer"
        )


@check("run_dir")
def _run_dir(config: Config) -> Iterator[str]:
    folder = config.run_dir
    if problem := path_problem(folder):
        yield f"run_dir '{folder}' {problem}; name another --run-dir"
        return
    there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        yield f"run_dir '{folder}' cannot be a folder, because '{there}' is a file; name another --run-dir"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"run_dir '{folder}' cannot be written: no permission in '{there}'; name another --run-dir"


@check("init_from")
def _init_from(config: Config) -> Iterator[str]:
    if config.init_from and (problem := path_problem(config.init_from)):
        yield f"init_from '{config.init_from}' {problem}; move or rename the folder"


def path_problem(folder: Path) -> str | None:
    """Why checkpoints cannot lie in `folder`; None if they can. Paths count as they are from the root, links resolved.

    TensorStore takes a backslash for a slash, and Orbax takes `gs:/` for a bucket, and brackets, `*` and `?` for
    patterns: arrays would be written to one folder and looked for in another.
    """
    path = Path(folder).resolve()
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        return "is not UTF-8, which checkpoints need"
    found = sorted(set(str(path)) & set("\\[]*?"))
    if found:
        return f"has a '{found[0]}' in its full path ({path}), with which checkpoints would be written elsewhere"
    if any(part.endswith(":") for part in path.parts):
        return f"has a folder whose name ends with a colon in its full path ({path}), which stands for a bucket"
    return None


@check("log.wandb")
def _wandb(config: Config) -> Iterator[str]:
    if config.log.wandb:
        package = importlib.util.find_spec("wandb")
        if package is None or package.origin is None:  # without origin it is the folder that wandb leaves behind
            yield (
                f"log.wandb is '{config.log.wandb}', but the package wandb is not installed; "
                f"run pip install 'jaxdist[wandb]', or leave log.wandb empty"
            )


def check_picture(path: str, example: str) -> None:
    """As `check_output`, of a picture, which is a PNG file; an empty path is none."""
    if not path:
        return
    check_output("picture", path, example)
    if Path(path).suffix != ".png":
        raise RequestError(f"picture '{path}' would be a PNG file; name it {Path(path).with_suffix('.png')}")


def check_output(what: str, path: str | Path, example: str) -> None:
    """Raise `RequestError` where `what` cannot be written to `path`, before the work whose result it is.

    `example` is a good name for it; an empty path is none. A regular file may be replaced, but none of a run.
    """
    if not str(path):
        return
    told = f"{what} '{path}'"
    try:
        _check_regular(told, Path(path), example)
        _check_folder(told, Path(path).absolute().parent)
        _check_no_run(told, Path(path))
    except OSError as error:  # such as a name that is too long
        reason = os.strerror(error.errno).lower()
        raise RequestError(f"{told} cannot be written: {reason}; name another file") from error


def _check_regular(told: str, path: Path, example: str) -> None:
    """To open a FIFO would wait for ever; to replace a link would leave what it names as it is."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if path.is_dir():
        raise RequestError(f"{told} is a folder; name a file in it, such as {path}/{example}")
    if stat.S_ISLNK(mode):
        raise RequestError(f"{told} is a symbolic link; name the file itself")
    if not stat.S_ISREG(mode):
        raise RequestError(f"{told} is a device, a FIFO or a socket; name a regular file")


def _check_folder(told: str, folder: Path) -> None:
    if not folder.is_dir():
        raise RequestError(f"{told} cannot be written: its folder does not exist; make it first")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RequestError(f"{told} cannot be written: no permission in '{folder}'; name another file")


OF_A_RUN = frozenset(
    [
        "config.toml",
        "environment.json",
        "run.json",
        "tokenizer.json",
        "metrics.jsonl",
        "log.txt",
        "log.txt.1",
        "loss.png",
        ".lock",
    ]
    + ["checkpoints", "heartbeats", "profile", "slurm", "tensorboard", "wandb"]
)
"""Files and folders that a run writes into its own folder."""


def _check_no_run(told: str, path: Path) -> None:
    parent = path.absolute().parent.resolve()
    for folder in (parent, *parent.parents):
        name = (parent / path.name).relative_to(folder).parts[0]
        if name in OF_A_RUN and _is_run(folder):
            raise RequestError(
                f"{told} belongs to the run in '{folder}', which writes {name} itself; name another file"
            )


def _is_run(folder: Path) -> bool:
    others = (".lock", "environment.json", "checkpoints")
    return (folder / "config.toml").is_file() and any((folder / name).exists() for name in others)
