"""The options of a command that are not knobs, and the parsing of a command line into options and plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxdist.request.knobs import KNOBS, canonical, option, shown


@dataclass(frozen=True)
class Extra:
    """An option of one command that is not a knob of the run, such as `--json`. A bool is a flag without a value."""

    name: str
    default: Any
    help: str
    type: Any = None
    """Anything that pydantic can parse from text, such as `Count`; by default the type of `default`."""
    many: bool = False
    """Whether it takes all words up to the next option, as a shell makes them of a pattern: a line of the text each."""

    @property
    def annotation(self) -> Any:
        """The type of the option."""
        return self.type or type(self.default)

    @property
    def flag(self) -> bool:
        """Whether the option takes no value."""
        return self.annotation is bool


JSON = Extra("json", False, "Print one JSON object on standard output, and nothing else.")


@dataclass
class Scan:
    """A command line split into `--name value`, `--name=value`, flags and plain words."""

    options: dict[str, str]
    positionals: list[str]
    failed: set[str]
    """Options without a value, or given twice."""
    problems: list[str]

    @classmethod
    def of(cls, argv: Sequence[str], extras: Sequence[Extra]) -> Scan:
        """Split `argv`. Valid options are the knobs and `extras`; unknown ones are kept for the caller to report."""
        scan = cls({}, [], set(), [])
        flags = {extra.name for extra in extras if extra.flag}
        valued = {*KNOBS, *(extra.name for extra in extras)} - flags
        many = {extra.name for extra in extras if extra.many}
        words = list(argv)
        while words:
            word = words.pop(0)
            if not word.startswith("--") or word == "--":
                scan.positionals.append(word)
                continue
            name, has_value, value = word.partition("=")
            name = canonical(name.removeprefix("--"))
            if name in flags:
                if has_value:
                    scan._fail(name, f"{option(name)} takes no value, but '{value}' was given")
                value = ""
            elif not has_value and words and not words[0].startswith("--"):
                # A word with a single hyphen is a value: -1x2x1.
                value = words.pop(0)
                while name in many and words and not words[0].startswith("--"):
                    value += f"\n{words.pop(0)}"
            elif not has_value and name in valued:
                scan._fail(name, f"{word} needs a value; write {word} value")
                continue
            scan.add(name, value)
        # An unknown name stays among the options, so that it is reported as unknown too.
        for name in scan.failed & {*valued, *flags}:
            scan.options.pop(name, None)
        return scan

    def add(self, name: str, value: str) -> None:
        """Add an option with its value; given before, it is among the problems."""
        # Python represents bytes that are not UTF-8 by these characters.
        if any("\udc80" <= character <= "\udcff" for character in value):
            self._fail(name, f"{option(name)} is {shown(value)}: must be UTF-8 text")
        if name in self.options:
            both = f" ('{self.options[name]}' and '{value}')" if value else ""
            self._fail(name, f"{option(name)} is given twice{both}; give it once")
        self.options.setdefault(name, value)

    def _fail(self, name: str, problem: str) -> None:
        self.failed.add(name)
        self.problems.append(problem)
