"""What can follow each command on a command line, asked from the commands themselves."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from jaxdist.__main__ import COMMANDS, MODULES
from jaxdist.config.values import IS_PATH, Suggested
from jaxdist.request import SHIPPED
from jaxdist.request.commandline import HelpShown
from jaxdist.request.knobs import KNOBS, kind, option
from jaxdist.request.options import Extra

HELP = {"--help": "show this help"}

Paths = Literal["", "file", "toml", "folder"]


@dataclass(frozen=True)
class Values:
    """What an option or an argument can be: some words, and paths of one kind; neither where only the user knows."""

    words: tuple[str, ...] = ()
    paths: Paths = ""


ARGUMENTS = {
    "CONFIG": Values(tuple(SHIPPED), "toml"),
    "RUN": Values(paths="folder"),
    "RUNS": Values(paths="folder"),
    "PATH": Values(paths="file"),
}


@dataclass
class Command:
    """A command, or the beginning of one: "", "bench" and "bench step". All texts are by name."""

    names: dict[str, str] = field(default_factory=dict)
    """The words that continue it, with what they do. It is complete if there are none."""
    flags: dict[str, str] = field(default_factory=HELP.copy)
    """Options without a value, with their descriptions."""
    options: dict[str, str] = field(default_factory=dict)
    """Options with a value, with their descriptions."""
    values: dict[str, Values] = field(default_factory=dict)
    """The values of those options that are words or paths; "" stands for the argument: CONFIG, RUN or PATH."""


def commands() -> dict[str, Command]:
    """Return every command and every beginning of one, by the words that the user writes."""
    found = {"": Command(flags={**HELP, "--version": "print the version of jaxdist"})}
    for name, about in COMMANDS.items():
        word, *more = name.split()
        module = importlib.import_module(MODULES.get(word, f"jaxdist.{word}"))
        names = {more[0]: about} if more else continuations(word, module)
        if not names:
            found[word] = complete(module, [])
        else:
            found.setdefault(word, Command()).names.update(names)
            for last in names:
                found[f"{word} {last}"] = complete(module, [last])
        # `COMMANDS` describes each of several measurements or launchers, and nothing that they have in common.
        found[""].names[word] = ", ".join(found[word].names) if more else about
    return found


def continuations(word: str, module: ModuleType) -> dict[str, str]:
    """Return the words that must follow the command `word`, with what they do; `COMMANDS` does not list these."""
    if word == "lab":
        return module.names()
    if word == "completion":
        return module.SHELLS
    return {}


def complete(module: ModuleType, words: Sequence[str]) -> Command:
    """Return what follows a command, which is asked for its help."""
    try:
        with redirect_stdout(io.StringIO()):
            module.main([*words, "--help"])
    except HelpShown as shown:
        return described(shown)
    raise AssertionError(f"{module.__name__} {words} has shown no help")


def described(shown: HelpShown) -> Command:
    """Return the options of a command, its own ones first, as its help lists them."""
    command = Command()
    if shown.positional:
        command.values[""] = ARGUMENTS[shown.positional]
    for extra in shown.extras:
        if extra.flag:
            command.flags[option(extra.name)] = extra.help
        else:
            command.options[option(extra.name)] = extra.help
    for name in shown.knobs:
        command.options[option(name)] = KNOBS[name].description or ""
    for name, values in values_of(shown.extras, shown.knobs):
        if values != Values() and name in command.options:
            command.values[name] = values
    return command


def values_of(extras: Sequence[Extra], knobs: Sequence[str]) -> Iterator[tuple[str, Values]]:
    """Yield options and what their types say of their values."""
    for extra in extras:
        metadata = getattr(extra.annotation, "__metadata__", ())
        yield option(extra.name), values_of_type(extra.annotation, metadata)
    for name in knobs:
        yield option(name), values_of_type(KNOBS[name].annotation, KNOBS[name].metadata)


def values_of_type(annotation: Any, metadata: Sequence[Any]) -> Values:
    """Return what a type and the `metadata` of its `Annotated` say of its values."""
    word = kind(annotation)
    words: list[str] = []
    if "|" in word:
        words = word.split("|")
    for remark in metadata:
        if isinstance(remark, Suggested):
            words += remark.words
    if word == "path" or IS_PATH in metadata:
        return Values(tuple(words), "file")
    return Values(tuple(words))
