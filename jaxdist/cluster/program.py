"""A program of the user's that a launcher starts: what stands behind `--` on its command line. No jax here."""

from __future__ import annotations

import importlib.util
import os
import re
import tokenize
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from jaxdist.config import RequestError

PYTHON_OPTIONS = re.compile(r"-(?P<flags>[bBdEIOPqRsSuvx]*)(?P<valued>[mcXW]?)(?P<value>.*)", re.DOTALL)
"""Options of Python before a script: letters without a value, and at most one with a value."""

EXAMPLE = "-- my_train.py --its-options, or -- -m my.module --its-options"


@dataclass(frozen=True)
class Program:
    """A script or a module, and its options: all that follows `python` on a command line."""

    words: tuple[str, ...]
    name: str
    """The script without folder and ending, or the module: what a run folder is called by default."""
    script: Path | None = None
    """The file; None for a module."""

    @classmethod
    def of(cls, words: Sequence[str]) -> Program:
        """Read the words behind `--`. Raises `RequestError` where they name no program that can be started."""
        position = 0
        while position < len(words) and words[position].startswith("-"):
            word = words[position]
            found = PYTHON_OPTIONS.fullmatch(word)
            if not found or (found["value"] and not found["valued"]):
                raise RequestError(
                    f"{word} stands behind --, where a program begins: write options of the launcher and of train "
                    f"before the --, and a program behind it: {EXAMPLE}"
                )
            position += 1
            if found["valued"] and not found["value"]:
                position += 1
            if found["valued"] not in ("m", "c"):
                continue
            value = found["value"] or "".join(words[position - 1 : position])
            if not value:
                raise RequestError(f"{word} is the last word behind --, and needs a value: {EXAMPLE}")
            if found["valued"] == "m":
                _check_module(value)
                return cls(tuple(words), value.removesuffix(".__main__").rpartition(".")[2])
            return cls(tuple(words), "python")
        if position >= len(words):
            raise RequestError(f"-- is followed by no program; write {EXAMPLE}, or leave -- out to train")
        script = Path(words[position])
        _check_script(script)
        return cls(tuple(words), script.stem, script)


def _check_script(path: Path) -> None:
    """Raise `RequestError` unless Python can start this file."""
    if re.fullmatch(r"python[0-9.]*", path.name):
        raise RequestError(f"{path} is no script; leave it out, since the launcher starts its own Python: {EXAMPLE}")
    where = "" if path.is_absolute() else f" in {os.getcwd()}"
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise RequestError(f"'{path}' behind -- is a folder without a __main__.py; name a script: {EXAMPLE}")
    if path.is_dir():
        return
    if not path.exists():
        raise RequestError(f"there is no script '{path}'{where}; behind -- stands a program: {EXAMPLE}")
    if zipfile.is_zipfile(path):
        return
    try:
        with tokenize.open(path) as file:
            compile(file.read(), str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f" line {error.lineno}" if error.lineno else ""
        raise RequestError(f"{path}{line} is not Python: {error.msg}; correct it, or name another script") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise RequestError(f"script {path} cannot be read ({why}); name another") from error


def _check_module(name: str) -> None:
    """Raise `RequestError` unless there is a module of this name. Nothing of it is run."""
    first, *rest = name.split(".")
    try:
        spec = PathFinder.find_spec(first, [os.getcwd()]) or importlib.util.find_spec(first)
    except ValueError:
        spec = None
    path = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            break
        path += f".{part}"
        spec = PathFinder.find_spec(path, list(spec.submodule_search_locations))
    if spec is None or path != name:
        raise RequestError(f"there is no module '{path}' for -m {name}, in {os.getcwd()} or among those of this Python")
    inside = spec.submodule_search_locations
    if inside is not None and PathFinder.find_spec(f"{name}.__main__", list(inside)) is None:
        raise RequestError(f"{name} is a package without a __main__.py, which -m cannot start; name a module in it")
