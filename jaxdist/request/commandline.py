"""The command line that all commands share, and the exit codes of their outcomes."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

from pydantic import TypeAdapter, ValidationError

from jaxdist.config import ClusterConfig, Config, RequestError, listed
from jaxdist.config.values import path_error
from jaxdist.huggingface.folder import is_adapters, other_form
from jaxdist.mesh import AUTO
from jaxdist.output.streams import protect
from jaxdist.output.units import counted
from jaxdist.process import stop_signals
from jaxdist.process.exit_codes import DONE, FAILED, STOPPED
from jaxdist.request.checks.files import path_problem
from jaxdist.request.conditions import Known
from jaxdist.request.helptext import help_text
from jaxdist.request.knobs import KNOBS, option, sentence, shown, within
from jaxdist.request.options import Extra, Scan
from jaxdist.request.own_runs import is_of_fit, no_config, why_no_run
from jaxdist.request.reading import batch_note, read, to_toml
from jaxdist.request.unused import notes
from jaxdist.weights.named import model_folder

LAYOUT_KNOBS = (
    "mesh",
    "precision",
    "parallel.zero",
    "parallel.sequence",
    "parallel.context",
    "parallel.rules",
    "pipeline",
)
"""Knobs that determine the layout of the weights and the compute dtype."""

STEP_KNOBS = (
    "mesh",
    "precision",
    "parallel",
    "pipeline",
    "model",
    "optimizer",
    "train.global_batch_size",
    "train.accumulation",
)
"""Knobs that determine a train step."""

OF_RUNS = ("fault.compare", "fault.rollbacks", "fault.notify")
"""Knobs of fault tolerance that only a training has."""

JOB_KNOBS = ("cluster", *(name for name in KNOBS if within(name, ["fault"]) and name not in OF_RUNS))
"""Knobs of the rendezvous of several processes, and of fault tolerance."""

PLANNED_KNOBS = (
    "parallel.zero",
    "parallel.sequence",
    "parallel.context",
    "parallel.replica_zero",
    "parallel.micro_batches",
    "parallel.offload",
    "parallel.rules",
    "pipeline",
    "train.accumulation",
    "model.remat",
)
"""Knobs that `--mesh auto` decides besides the mesh. What changes the loss it takes as it is given."""

Positional = Literal["CONFIG", "RUN", "RUNS", "PATH"]
"""What the words of a command are that are no options."""

CONFIG_ENDING = ".toml"
"""Of a PATH that is a CONFIG, whose data are meant."""

RUN_KNOBS = (
    *LAYOUT_KNOBS,
    *JOB_KNOBS,
    *(name for name in KNOBS if within(name, ["data"]) and name != "data.skip"),
    *("train.global_batch_size", "train.accumulation"),
)
"""Knobs that may differ when a checkpoint of a run is used."""


@dataclass(frozen=True)
class Request:
    """A validated request: the configuration of the run, and the other options of the command line."""

    config: Config
    positional: str | None
    overrides: dict[str, str]
    extras: dict[str, Any]
    words: tuple[str, ...] = ()
    """All RUNS of a command that takes several."""
    notes: tuple[str, ...] = ()
    """What the request means where that is not obvious, a sentence each."""

    @property
    def text(self) -> str:
        """All of the request as text, without the index of this process: it is the same in all processes of a job."""
        shared = self.config.model_copy(update={"cluster": ClusterConfig()})
        return to_toml(shared) + "".join(f"{option(name)} {value}\n" for name, value in self.extras.items())

    def tell_unused(self, processes: int) -> None:
        """Print the notes, and a line about each option that a job of this number of processes does not use."""
        for note in [*self.notes, *notes(self.config, Known(processes=processes), self.overrides)]:
            print(f"note        {note}", file=sys.stderr)


class HelpShown(SystemExit):
    """End of a command that has printed its help. It carries what the help lists, which `jaxdist completion` reads."""

    def __init__(self, positional: str | None, extras: Sequence[Extra], knobs: Sequence[str]):
        """`knobs` are the names of all knobs that the command takes."""
        super().__init__(DONE)
        self.positional = positional
        self.extras = extras
        self.knobs = knobs


def arguments(
    argv: list[str] | None,
    command: str,
    description: str,
    *,
    positional: Positional | None = "CONFIG",
    extras: Sequence[Extra] = (),
    knobs: Collection[str] | None = None,
    pretrained: bool = False,
    of_fit: bool = False,
) -> Request:
    """Parse `argv` (None: that of the process), whose first word is an optional CONFIG, a RUN folder, or a PATH.

    All words are RUNS for a command that compares runs; their configurations are not read here.
    `command` is the name as users write it ("bench step"). `positional` is None for a command that trains nothing and
    takes only its own options. A PATH is the same as --data.path, but a .toml is a CONFIG there. `knobs` are the knobs,
    or their sections, that the command uses; None means all of them, or for a RUN `RUN_KNOBS`. With `pretrained`, a
    folder of Hugging Face may take the place of RUN; with `of_fit`, that of a run of `jaxdist.fit`, and all knobs have
    their defaults then.
    Prints the help and raises `HelpShown` on --help. Raises `RequestError` with a sentence for each problem.
    """
    if argv is None:
        argv = sys.argv[1:]
    if knobs is None and positional == "RUN":
        knobs = RUN_KNOBS
    if "--help" in argv or "-h" in argv:
        print(help_text(command, description, positional, extras, knobs))
        raise HelpShown(positional, extras, [name for name in KNOBS if knobs is None or within(name, knobs)])
    scan = Scan.of(argv, extras)
    named = _named(scan, command, positional, pretrained, of_fit)
    if named.knobs:
        knobs = (*(knobs or ()), *named.knobs)
    problems = [*scan.problems, *named.problems]
    chosen = {extra.name: extra.default for extra in extras}
    for extra in extras:
        if extra.name in scan.options:
            _set_extra(extra, scan.options.pop(extra.name), chosen, problems)
    # Without the config of the run, no value of a knob can be checked.
    failed = KNOBS if named.no_run else scan.failed
    result, more = read(named.config, scan.options, failed, knobs, also=chosen, run=named.run)
    problems += more
    planned = [option(name) for name in scan.options if within(name, PLANNED_KNOBS)]
    if result.mesh == AUTO and planned:
        problems.append(f"--mesh {AUTO} decides {', '.join(planned)} too; leave it out, or write the mesh")
    if problems:
        raise RequestError(*problems)
    word = scan.positionals[0] if scan.positionals else None
    if positional == "RUN":
        assert word is not None
        # The folder may have been moved since the run wrote its config.
        result = result.model_copy(update={"run_dir": Path(word)})
    note = "" if positional == "RUN" else batch_note(named.config, result, scan.options)
    return Request(result, word, scan.options, chosen, named.words, (note,) if note else ())


class _Named(NamedTuple):
    """What the words of a command line name that are no options."""

    config: str | None = None
    """The configuration: the name of a shipped one, or a file; None: all knobs have their defaults."""
    run: Path | None = None
    """The folder of the run whose configuration it is."""
    words: tuple[str, ...] = ()
    """All RUNS of a command that takes several."""
    knobs: tuple[str, ...] = ()
    """Further knobs that may stand beside such a name."""
    problems: Sequence[str] = ()
    no_run: bool = False
    """Whether a run is needed, and none could be found."""


def _named(scan: Scan, command: str, positional: Positional | None, pretrained: bool, of_fit: bool) -> _Named:
    """Return what the words name, as `arguments` takes them. A PATH is added to the options."""
    if positional == "RUNS":
        return _Named(words=tuple(scan.positionals), problems=list(_problems_of_runs(command, scan.positionals)))
    word = scan.positionals[0] if scan.positionals else None
    surplus = list(_unexpected(scan.positionals[1:] if positional else scan.positionals))
    if positional == "RUN" and pretrained and word and model_folder(Path(word)) and not is_adapters(Path(word)):
        # Not the name of a shipped config, which a folder may have too.
        return _Named(os.path.join(os.curdir, word), knobs=("model.sequence",), problems=surplus)
    if positional == "RUN":
        config, problem = _config_of_run(command, word, of_fit)
        if problem:
            return _Named(problems=[problem, *surplus], no_run=True)
        return _Named(config, Path(word or ""), problems=surplus)
    if positional == "PATH" and word is not None and not word.endswith(CONFIG_ENDING):
        scan.add("data.path", word)
        return _Named(problems=surplus)
    return _Named(word if positional else None, problems=surplus)


def _unexpected(surplus: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each argument too many; one for all where the shell has made files of a pattern."""
    if surplus and all(map(os.path.isfile, surplus)):
        first = Path(surplus[0])
        more = f" and {counted(len(surplus) - 1, 'more file')}" if len(surplus) > 1 else ""
        yield (
            f"unexpected argument '{first}'{more}; if the shell has expanded a pattern, put it in quotes, such as "
            f"'{first.with_name(f'*{first.suffix}')}'; other options are written --name value"
        )
        return
    unexpected = (f"unexpected argument '{argument}'; options are written --name value" for argument in surplus)
    yield from listed(unexpected, len(surplus), "such arguments")


def _problems_of_runs(command: str, folders: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong with the names of several runs."""
    if not folders:
        yield f"{command} needs RUNS, the folders of runs, such as runs/a runs/b"
    seen: dict[str, str] = {}
    for folder in dict.fromkeys(folders):
        problem = _wrong_name(command, folder)
        if problem:
            yield problem
            continue
        if folders.count(folder) > 1:
            yield f"run folder '{folder}' is named {folders.count(folder)} times; name it once"
        before = seen.setdefault(os.path.realpath(folder), folder)
        if before != folder:
            yield f"run folders '{before}' and '{folder}' are the same one; name it once"


def _wrong_name(command: str, folder: str) -> str:
    """Return what is wrong with the name of a run folder, as a sentence; empty if nothing is."""
    if not folder:
        return f"RUN is empty; {command} needs the folder of a run, such as runs/gpt_tiny"
    invalid = path_error(folder)
    if invalid:
        return f"run folder {shown(folder)} {invalid}"
    problem = path_problem(Path(folder))
    if problem:
        return f"run folder '{folder}' {problem}; move or rename it"
    return ""


def _config_of_run(command: str, folder: str | None, of_fit: bool) -> tuple[str | None, str]:
    """Return the path of the config in a run folder, or None and what is wrong with the folder.

    Nothing is wrong with the folder of a run of `jaxdist.fit` where the command reads it, `of_fit`.
    """
    if folder is None:
        return None, f"{command} needs a RUN, the folder of a run, such as runs/gpt_tiny"
    wrong = _wrong_name(command, folder)
    if wrong:
        return None, wrong
    config = Path(folder) / "config.toml"
    if is_of_fit(Path(folder)):
        return None, "" if of_fit else no_config(Path(folder), command)
    if not os.path.isfile(config):
        return None, other_form(Path(folder)) or why_no_run(Path(folder))
    return str(config), ""


def _set_extra(extra: Extra, text: str, chosen: dict[str, Any], problems: list[str]) -> None:
    if extra.flag:
        chosen[extra.name] = True
        return
    try:
        chosen[extra.name] = TypeAdapter(extra.annotation).validate_python(text)
    except ValidationError as error:
        problems.append(sentence(option(extra.name), text, error.errors()[0], extra.annotation))


def outcome(main: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a command and return its exit code. Other exceptions than those for invalid requests and signals propagate.

    Prints the problems of an invalid request, and that a signal has stopped the command.
    """
    # The spec has the name of the module even when it runs as __main__.
    spec = main.__globals__.get("__spec__")
    name = spec.name.removesuffix(".__main__") if spec else "jaxdist"
    # A signal kills the process silently while its modules are imported; from here on it is an exception.
    with stop_signals.raising():
        try:
            code = main(argv)
            if code != STOPPED:
                stop_signals.raise_dropped()
            return code
        except RequestError as error:
            for problem in error.problems:
                print(f"{name}: {problem}", file=sys.stderr)
            return error.exit_code
        except KeyboardInterrupt as error:
            stop_signals.hold()
            # Without a name it is Python's own, of Ctrl-C.
            by = error.args[0] if error.args else "SIGINT"
            what = "interrupted" if by == "SIGINT" else f"stopped by {by}"
            print(f"{name}: {what}", file=sys.stderr)
            return STOPPED


def run(main: Callable[[list[str]], int], needs_output: bool = True) -> NoReturn:
    """Run a command as the program, and exit with its code; 1 with a traceback after an unexpected exception.

    Its words are the arguments of the process.

    The program continues if standard error is lost and, unless it `needs_output`, if standard output is lost too: the
    results of such a command are in files.
    """
    protect(output=not needs_output)
    code = DONE
    try:
        try:
            code = outcome(main, sys.argv[1:])
        finally:
            # A pipe gets short texts only here. At Python's own flush, it is too late to catch an error.
            if sys.stdout:
                sys.stdout.flush()
    except OSError as error:
        if not _output_is_gone(error):
            raise
        # Standard output leads to /dev/null from here on, so that Python's final flush does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = code or FAILED
    sys.exit(code)


def _output_is_gone(error: OSError) -> bool:
    """Return whether standard output has no reader: a pipe, as in `--help | head`, or a terminal that was closed."""
    if isinstance(error, BrokenPipeError):
        return True
    if error.errno != errno.EIO:
        return False
    try:
        # A disk may have failed instead; a terminal that is gone does not take even this.
        os.write(sys.stdout.fileno(), b"")
    except OSError:
        return True
    return False
