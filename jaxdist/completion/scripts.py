"""The scripts: the table of commands as `case` and `switch` statements, in the template of each shell."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from jaxdist import __version__
from jaxdist.completion.table import Command, Values

HERE = Path(__file__).parent


def script(shell: str, commands: Mapping[str, Command]) -> str:
    """Return the script for `shell`: a key of `TABLES`."""
    head = f"# Completion of jaxdist {__version__}, written by: jaxdist completion {shell}\n\n"
    template = (HERE / f"template.{shell}").read_text()
    return head + "\n".join(TABLES[shell](commands)) + "\n\n" + template


def bash(commands: Mapping[str, Command]) -> Iterator[str]:
    """Yield the functions that set `names`, `flags`, `options` of a command, and `words`, `paths` of an option."""
    yield "_jaxdist_command() {"
    yield "    names='' flags='' options=''"
    yield "    case $1 in"
    for names, command in _alike(commands):
        yield f"    {'|'.join(map(shlex.quote, names))})"
        for variable, texts in _parts(command):
            yield f"        {variable}={shlex.quote(' '.join(texts))}"
        yield "        ;;"
    yield from ("    *) return 1 ;;", "    esac", "}", "")
    yield "_jaxdist_values() {"
    yield "    words='' paths=''"
    yield "    case $1 in"
    for keys, values in _grouped(commands):
        patterns = "|".join(_pattern(key) for key in keys)
        yield f"    {patterns}) words={shlex.quote(' '.join(values.words))} paths={shlex.quote(values.paths)} ;;"
    yield from ("    *) return 1 ;;", "    esac", "}")


def zsh(commands: Mapping[str, Command]) -> Iterator[str]:
    """Yield the same functions; `names`, `flags` and `options` are arrays of NAME:DESCRIPTION."""
    yield "_jaxdist_command() {"
    yield "    names=() flags=() options=()"
    yield "    case $1 in"
    for names, command in _alike(commands):
        yield f"    {'|'.join(map(shlex.quote, names))})"
        for variable, texts in _parts(command):
            yield f"        {variable}=("
            for text, about in texts.items():
                described = about.replace("\\", "\\\\").replace(":", "\\:")
                yield f"            {shlex.quote(f'{text}:{described}')}"
            yield "        )"
        yield "        ;;"
    yield from ("    *) return 1 ;;", "    esac", "}", "")
    yield "_jaxdist_values() {"
    yield "    words_of=() paths=''"
    yield "    case $1 in"
    for keys, values in _grouped(commands):
        patterns = "|".join(_pattern(key) for key in keys)
        listed = " ".join(map(shlex.quote, values.words))
        yield f"    {patterns}) words_of=({listed}) paths={shlex.quote(values.paths)} ;;"
    yield from ("    *) return 1 ;;", "    esac", "}")


def fish(commands: Mapping[str, Command]) -> Iterator[str]:
    """Yield functions that print lines of NAME, a tab and a DESCRIPTION, and the words and paths of an option."""
    for variable in ("names", "flags", "options"):
        yield f"function __jaxdist_{variable} --argument-names command"
        yield "    switch $command"
        for names, command in _alike(commands):
            texts = dict(_parts(command)).get(variable)
            if texts:
                yield f"        case {' '.join(map(_fish_quote, names))}"
                yield "            printf '%s\\t%s\\n' \\"
                lines = [f"                {_fish_quote(text)} {_fish_quote(about)}" for text, about in texts.items()]
                yield " \\\n".join(lines)
        yield from ("    end", "end", "")
    values = list(_grouped(commands))
    yield from _fish_cases("words", ((keys, value.words) for keys, value in values if value.words))
    yield ""
    yield from _fish_cases("paths", ((keys, [value.paths]) for keys, value in values if value.paths))


def _fish_cases(what: str, cases: Iterable[tuple[list[str], Iterable[str]]]) -> Iterator[str]:
    yield f"function __jaxdist_{what} --argument-names key"
    yield "    switch $key"
    for keys, printed in cases:
        # A quoted pattern matches as in the other shells: only the star is special.
        yield f"        case {' '.join(map(_fish_quote, keys))}"
        yield f"            printf '%s\\n' {' '.join(map(_fish_quote, printed))}"
    yield from ("    end", "end")


def _parts(command: Command) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield `names`, `flags` and `options` of a command, those that it has."""
    for variable, texts in (("names", command.names), ("flags", command.flags), ("options", command.options)):
        if texts:
            yield variable, texts


def _alike(commands: Mapping[str, Command]) -> Iterator[tuple[list[str], Command]]:
    """Yield each command with the names of all commands that are the same, such as the claims of the lab."""
    groups: list[tuple[list[str], Command]] = []
    for name, command in commands.items():
        for names, other in groups:
            if other == command:
                names.append(name)
                break
        else:
            groups.append(([name], command))
    yield from groups


def _grouped(commands: Mapping[str, Command]) -> Iterator[tuple[list[str], Values]]:
    """Yield each set of values with its keys, COMMAND:OPTION; *:OPTION where every command means the same."""
    takers: dict[str, dict[str, Values]] = {}
    for name, command in commands.items():
        for option in [*command.options, *([""] if "" in command.values else [])]:
            takers.setdefault(option, {})[name] = command.values.get(option, Values())
    keys: dict[Values, list[str]] = {}
    for option, by_command in takers.items():
        different = set(by_command.values())
        if len(different) == 1 and option:
            keys.setdefault(different.pop(), []).append(f"*:{option}")
        else:
            for name, values in by_command.items():
                keys.setdefault(values, []).append(f"{name}:{option}")
    for values, names in keys.items():
        if values != Values():
            yield names, values


def _pattern(key: str) -> str:
    """Return a key as a pattern of `case`, in which only a star at its beginning is special."""
    if key.startswith("*"):
        return "*" + shlex.quote(key[1:])
    return shlex.quote(key)


def _fish_quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


TABLES: dict[str, Callable[[Mapping[str, Command]], Iterator[str]]] = {"bash": bash, "zsh": zsh, "fish": fish}
