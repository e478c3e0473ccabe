"""Files, folders and packages of this machine."""

from __future__ import annotations

import importlib.util
import os
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
    there = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        yield f"run_dir '{folder}' cannot be a folder, because '{there}' is a file; name another --run-dir"
    elif not os.access(there, os.W_OK | os.X_OK):
        yield f"run_dir '{folder}' cannot be written: no permission in '{there}'; name another --run-dir"


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
    """As `check_output`, of a picture, which is a PNG file."""
    check_output("picture", path, example)
    if path and Path(path).suffix != ".png":
        raise RequestError(f"picture '{path}' would be a PNG file; name it {Path(path).with_suffix('.png')}")


def check_output(what: str, path: str, example: str) -> None:
    """Raise `RequestError` where `what` cannot be written to `path`, before the work whose result it is.

    `example` is a good name for it; an empty path is none.
    """
    if path and Path(path).is_dir():
        raise RequestError(f"{what} '{path}' is a folder; name a file in it, such as {path}/{example}")
    if path and not Path(path).absolute().parent.is_dir():
        raise RequestError(f"{what} '{path}' cannot be written: its folder does not exist; make it first")
