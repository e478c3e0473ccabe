"""`python -m jaxdist.data PATH`: look at data before a training, and write their tokens for others. No jax here."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxdist.cluster.process_env import check_alone
from jaxdist.config import Failed, RequestError
from jaxdist.config.values import FileName
from jaxdist.data.naming.paths import open_each
from jaxdist.data.sources import Sources
from jaxdist.files import replacing
from jaxdist.files.reasons import reason
from jaxdist.process.exit_codes import DONE, FAILED
from jaxdist.request import JSON, Extra, Request, arguments, check_output, check_output_folder, means_folder, run
from jaxdist.request.commandline import CONFIG_ENDING
from jaxdist.request.knobs import KNOBS, within
from jaxdist.training.export_target import exporting

if TYPE_CHECKING:
    from jaxdist.data.streams import Streams
    from jaxdist.data.survey.look import Look
    from jaxdist.training.data_progress import DataProgress

DESCRIPTION = (
    "Look at data before a training: what the files are, documents, their lengths as a picture, duplicates, tokens, "
    "how many documents rows would cut, samples with the borders of tokens, and what a training would refuse. Reads "
    "everything. The exit code is 2 if something is refused."
)
EXTRAS = [
    Extra(
        "export",
        "",
        "Write the tokens, headerless uint16 or uint32: to this folder (a name that ends in /, or a folder that "
        "exists) as train.bin, val.bin and tokenizer.json, or to this .bin, those that are held out last.",
        FileName,
    ),
    Extra("force", False, "Let --export replace a .bin, or a folder of an earlier export that has not been changed."),
    Extra(
        "verify",
        False,
        "Instead, read every byte: compare the ids of tokens with model.vocab, and the data, and all tokens in the "
        "cache, with what they were when they were first read. A start looks at samples. The exit code is 1 if any "
        "differ.",
    ),
    JSON,
]

ALL_AS_BEFORE = "every byte of the data, and of the tokens in the cache, is what it was when it was first read"

NOTHING_WRONG = "nothing is wrong with what there was to compare"

OF_ROWS = ("data.changed", "data.pack", "data.augment", "data.skip", "data.prefetch")
"""Knobs of data that say nothing of what is read."""

USED = (*(name for name in KNOBS if within(name, ["data"]) and name not in OF_ROWS), "model.sequence", "model.vocab")


def main(argv: list[str] | None = None) -> int:
    """Print what data are, after exporting their tokens if requested. Return the exit code."""
    request = arguments(argv, "data", DESCRIPTION, positional="PATH", extras=EXTRAS, knobs=USED)
    check_alone("data")
    if request.config.model.images:
        raise RequestError(
            f"{request.positional} has model.family {request.config.model.family}, which trains on images, and only "
            "text and tokens are looked at"
        )
    found = open_each(request.config.data)
    _check_export(request, found)
    if request.extras["verify"]:
        return _verify(request)
    if not request.extras["export"]:
        seen = _look(request, found)
    else:
        with _exporting(request.extras, found) as write:
            seen = _look(request, found)
            (streams,) = seen.streams.values()
            seen.figures["export"] = {"path": request.extras["export"], **write(streams)}
    _print(request, seen)
    return DONE


def _look(request: Request, found: Mapping[str, Sources]) -> Look:
    """Return what is found in the data. Where they are refused, prints it and raises `RequestError`."""
    # Imported only now, because they import numpy, which --help does not need.
    from jaxdist.data.survey.look import Asked, look

    model = request.config.model
    asked = Asked(request.config.data, model.vocab, _own_vocab(request), model.sequence)
    with _showing() as progress:
        seen = look(asked, found, progress)
    if seen.problems:
        _print(request, seen)
        raise RequestError(*seen.problems)
    return seen


def _verify(request: Request) -> int:
    """Print what is not as it was when it was first read. Return the exit code."""
    from jaxdist.data.verifying import verify, verify_cache

    with _showing() as progress:
        vocab = request.config.model.vocab if _own_vocab(request) else None
        found, notes = verify(request.config.data, vocab, progress)
        problems = [*found, *verify_cache(progress)]
    if request.extras["json"]:
        print(json.dumps({"problems": problems, "notes": notes}), flush=True)
    else:
        print("\n".join([*notes, *(problems or [NOTHING_WRONG if notes else ALL_AS_BEFORE])]), flush=True)
    return FAILED if problems else DONE


def _print(request: Request, seen: Look) -> None:
    from jaxdist.data.survey import report

    print(json.dumps(seen.figures) if request.extras["json"] else "\n".join(report.lines(seen.figures)), flush=True)


def _own_vocab(request: Request) -> bool:
    """Return whether the user has said model.vocab; in a config of the user it is that of the tokenizer."""
    return "model.vocab" in request.overrides or (request.positional or "").endswith(CONFIG_ENDING)


def _check_export(request: Request, found: Mapping[str, Sources]) -> None:
    """Raise `RequestError` for an export that cannot be made, before anything is read."""
    target = request.extras["export"]
    if target and request.extras["verify"]:
        raise RequestError("--verify writes nothing, and --export writes tokens; leave one of them out")
    if not target:
        if request.extras["force"]:
            raise RequestError("--force has no effect without --export; add that, or leave it out")
        return
    if len(found) > 1:
        raise RequestError(
            f"--export '{target}' writes the tokens of one source, and data.mixture has {len(found)}; export each by "
            f"itself, such as '{next(iter(found))}', with the same data.tokenizer"
        )
    (sources,) = found.values()
    if sources.training.chats:
        raise RequestError(
            f"--export '{target}' writes tokens alone, and of '{sources.name}' not all tokens are learned; train on it "
            "as it is"
        )
    if not (sources.training.holds_tokens or request.config.data.tokenizer or _own_vocab(request)):
        raise RequestError(
            f"--export '{target}' writes tokens, and '{sources.name}' is text without a tokenizer; give a "
            "--data.tokenizer, or the --model.vocab of one to train"
        )
    if means_folder(target):
        check_output_folder("--export", Path(target))
        return
    check_output("--export", target, "tokens.bin")
    if Path(target).suffix != ".bin":
        raise RequestError(
            f"--export '{target}' would be a file of tokens; name it {Path(target).with_suffix('.bin')}, or a folder "
            f"{target}/"
        )


@contextmanager
def _exporting(
    extras: Mapping[str, Any], found: Mapping[str, Sources]
) -> Iterator[Callable[[Streams], dict[str, Any]]]:
    """Yield what writes tokens to the target of --export, which is there at the end. Raises `RequestError` before."""
    # This module imports numpy.
    from jaxdist.data.token_export import write_file, write_folder

    target = Path(os.path.abspath(extras["export"]))
    if means_folder(extras["export"]):
        with exporting(target, replace=extras["force"]) as new:
            yield lambda streams: write_folder(streams, new)
        return
    if os.path.lexists(target):
        if any(os.path.samefile(target, path) for path in _files(found)):
            raise RequestError(f"--export '{target}' is one of the files that are read; name another")
        if not extras["force"]:
            raise RequestError(f"--export '{target}' is there already; name another, or add --force to replace it")
    try:
        with replacing(target) as new:
            yield lambda streams: write_file(streams, new, target.name)
    except OSError as error:
        raise Failed(f"the export to '{target}' failed: {reason(error)}; free some room, and export again") from error


def _files(found: Mapping[str, Sources]) -> Iterator[Path]:
    """Yield the files of all sources."""
    return (file.path for sources in found.values() for source in sources.all for file in source.files)


@contextmanager
def _showing() -> Iterator[DataProgress]:
    """Yield what shows the progress on standard error while data are read."""
    from jaxdist.training.console import Screen
    from jaxdist.training.data_progress import DataProgress

    screen = Screen()
    try:
        yield DataProgress(_nobody_waits, screen)
    finally:
        screen.pause()


def _nobody_waits() -> None:
    """Do nothing: no other process watches this one."""


if __name__ == "__main__":
    run(main)
