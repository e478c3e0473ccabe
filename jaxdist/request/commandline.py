"""The command line that all commands share, and how their outcomes become exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from pydantic import TypeAdapter, ValidationError

from jaxdist.config import ClusterConfig, Config, RequestError
from jaxdist.mesh import AUTO
from jaxdist.request.checks.files import path_problem
from jaxdist.request.helptext import help_text
from jaxdist.request.knobs import KNOBS, canonical, option, sentence, shown
from jaxdist.request.reading import read, to_toml
from jaxdist.streams import protect
from jaxdist.values import path_error

DONE, FAILED = 0, 1
"""Exit codes: done, anything that went wrong, a mistake in the request."""

LAYOUT_KNOBS = ("mesh", "precision", "parallel.zero", "parallel.sequence", "parallel.rules", "pipeline")
"""Where weights lie, and what is computed in."""

STEP_KNOBS = ("mesh", "precision", "parallel", "pipeline", "model", "optimizer")
STEP_KNOBS += ("train.global_batch_size", "train.accumulation")
"""What a train step follows from."""

JOB_KNOBS = ("cluster", "fault")
"""How several processes meet, and when they give up."""

PLANNED = ("parallel", "pipeline", "train.accumulation", "model.remat")
"""What `--mesh auto` decides beside the mesh."""

RUN_KNOBS = (*LAYOUT_KNOBS, *JOB_KNOBS, "data", "train.global_batch_size", "train.accumulation")
"""What may differ when the checkpoint of a run is used."""


@dataclass(frozen=True)
class Extra:
    """An option of one command that is not a knob of the run, such as `--json`. A bool is a flag without a value."""

    name: str
    default: Any
    help: str
    type: Any = None
    """Anything that pydantic can parse from text, such as `Count`; by default the type of `default`."""

    @property
    def annotation(self) -> Any:
        return self.type or type(self.default)

    @property
    def flag(self) -> bool:
        return self.annotation is bool


@dataclass(frozen=True)
class Asked:
    """A checked request: the run's configuration, and what else the command line said."""

    config: Config
    positional: str | None
    overrides: dict[str, str]
    extras: dict[str, Any]

    @property
    def text(self) -> str:
        """All of it but for the place of this process: what the processes of one job have alike."""
        alike = self.config.model_copy(update={"cluster": ClusterConfig()})
        return to_toml(alike) + "".join(f"{option(name)} {value}\n" for name, value in self.extras.items())


def arguments(
    argv: list[str] | None,
    command: str,
    description: str,
    *,
    positional: Literal["CONFIG", "RUN"] | None = "CONFIG",
    extras: Sequence[Extra] = (),
    knobs: Collection[str] | None = None,
) -> Asked:
    """Read `argv` (None: that of the process), whose first argument is an optional CONFIG, or a RUN folder.

    `positional` None is a command that trains nothing: it takes its own options only. `command` is as people write it
    ("bench step"). `knobs` are those, or the sections, that it uses; None is all, or for a RUN `RUN_KNOBS`.
    Prints the help and exits on --help. Raises `RequestError` with every mistake, a sentence each.
    """
    argv = sys.argv[1:] if argv is None else argv
    knobs = RUN_KNOBS if knobs is None and positional == "RUN" else knobs
    if "--help" in argv or "-h" in argv:
        print(help_text(command, description, positional, extras, knobs))
        sys.exit(DONE)
    scan = Scan.of(argv, extras)
    config, problems = None, scan.problems
    if positional == "RUN":
        config, more = _config_of_run(command, scan.positionals)
        problems += more
    elif scan.positionals and positional:
        config = scan.positionals[0]
    surplus = scan.positionals[1 if positional else 0 :]
    problems += [f"unexpected argument '{word}'; options are written --name value" for word in surplus]
    chosen = {extra.name: extra.default for extra in extras}
    for extra in extras:
        if extra.name in scan.options:
            _set_extra(extra, scan.options.pop(extra.name), chosen, problems)
    failed = KNOBS if positional == "RUN" and config is None else scan.failed
    result, more = read(config, scan.options, failed, knobs, also=chosen)
    if result.mesh == AUTO and (said := [option(name) for name in scan.options if name.startswith(PLANNED)]):
        more.append(f"--mesh {AUTO} decides {', '.join(said)} too; leave it out, or write the mesh")
    if problems + more:
        raise RequestError(*problems, *more)
    word = scan.positionals[0] if scan.positionals else None
    if positional == "RUN":  # a run folder may have been moved
        result = result.model_copy(update={"run_dir": Path(word)})
    return Asked(result, word, scan.options, chosen)


@dataclass
class Scan:
    """The command line taken apart: `--name value`, `--name=value`, flags and plain words."""

    options: dict[str, str]
    positionals: list[str]
    failed: set[str]
    """Options without a value, or given twice."""
    problems: list[str]

    @classmethod
    def of(cls, argv: Sequence[str], extras: Sequence[Extra]) -> Scan:
        scan, words = cls({}, [], set(), []), list(argv)
        flags = {extra.name for extra in extras if extra.flag}
        valued = {*KNOBS, *(extra.name for extra in extras)} - flags
        while words:
            word = words.pop(0)
            if not word.startswith("--") or word == "--":
                scan.positionals.append(word)
                continue
            name, has_value, value = word.partition("=")
            name = canonical(name.removeprefix("--"))
            if name in flags:
                if has_value:
                    scan._wrong(name, f"{option(name)} takes no value, but '{value}' was given")
                value = ""
            elif not has_value and words and not words[0].startswith("--"):
                value = words.pop(0)  # one hyphen is a value: -1x2x1
            elif not has_value and name in valued:
                scan._wrong(name, f"{word} needs a value; write {word} value")
                continue
            scan._add(name, value)
        for name in scan.failed & {*valued, *flags}:  # a name that does not exist is still to be told
            scan.options.pop(name, None)
        return scan

    def _add(self, name: str, value: str) -> None:
        if any("\udc80" <= character <= "\udcff" for character in value):  # how Python holds bytes that are not UTF-8
            self._wrong(name, f"{option(name)} is {shown(value)}: must be UTF-8 text")
        if name in self.options:
            both = f" ('{self.options[name]}' and '{value}')" if value else ""
            self._wrong(name, f"{option(name)} is given twice{both}; give it once")
        self.options.setdefault(name, value)

    def _wrong(self, name: str, problem: str) -> None:
        self.failed.add(name)
        self.problems.append(problem)


def _config_of_run(command: str, positionals: list[str]) -> tuple[str | None, list[str]]:
    if not positionals:
        return None, [f"{command} needs a RUN, the folder of a run, such as runs/gpt_tiny"]
    folder = positionals[0]
    if not folder:
        return None, [f"RUN is empty; {command} needs the folder of a run, such as runs/gpt_tiny"]
    if wrong := path_error(folder):
        return None, [f"run folder {shown(folder)} {wrong}"]
    if problem := path_problem(Path(folder)):
        return None, [f"run folder '{folder}' {problem}; move or rename it"]
    config = Path(folder) / "config.toml"
    if not os.path.isfile(config):
        return None, [f"'{folder}' is not the folder of a run: it has no config.toml"]
    return str(config), []


def _set_extra(extra: Extra, text: str, chosen: dict[str, Any], problems: list[str]) -> None:
    try:
        chosen[extra.name] = True if extra.flag else TypeAdapter(extra.annotation).validate_python(text)
    except ValidationError as error:
        problems.append(sentence(option(extra.name), text, error.errors()[0], extra.annotation))


def outcome(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a command and return its exit code; mistakes in the request are printed, other exceptions pass."""
    spec = main.__globals__.get("__spec__")  # tells the name also where the module runs as __main__
    name = spec.name.removesuffix(".__main__") if spec else "jaxdist"
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # while modules were imported
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return main(argv)
    except RequestError as error:
        for problem in error.problems:
            print(f"{name}: {problem}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return FAILED


def run(main: Callable[[list[str]], int], needs_output: bool = True) -> NoReturn:
    """Run a command as the program: exit with its code, that of a mistake in the request, or 1 with a traceback.

    Without standard error it goes on, and where not `needs_output`, because its result is in files, without standard
    output.
    """
    protect(output=not needs_output)
    try:
        sys.exit(outcome(main, sys.argv[1:]))
    except BrokenPipeError:  # the reader of a pipe has seen enough, as in `--help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
