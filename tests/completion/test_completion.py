"""Completion in real shells: of commands, options, values, configs, clusters and paths, without a process at a TAB."""

import io
import re
from contextlib import redirect_stdout
from functools import cache

import pytest

from jaxdist.__main__ import COMMANDS, main
from jaxdist.completion.__main__ import SHELLS
from jaxdist.completion.table import Values, commands
from jaxdist.lab.__main__ import LABS
from jaxdist.lab.claims import claims
from jaxdist.optimizers.table import UPDATE_RULES
from jaxdist.planning.clusters import PRESETS
from jaxdist.request import SHIPPED
from jaxdist.request.commandline import RUN_KNOBS
from jaxdist.request.knobs import KNOBS, option, within
from tests.completion.shells import in_bash, needed, offered, typing, wait

FIRST = {name.split()[0] for name in COMMANDS}
EVERY_KNOB = {option(name) for name in KNOBS}
OF_A_RUN = {option(name) for name in KNOBS if within(name, RUN_KNOBS)}
SCHEDULES = {"gpipe", "1f1b", "interleaved", "zb-h1", "zb-u", "pipedream"}

LINES = {
    # What stands on the line: what is offered, and what is not.
    "jaxdist ": (FIRST, {"step", "gpt_tiny", "--mesh"}),
    "jaxdist --": ({"--help", "--version"}, {"--mesh"}),
    "jaxdist be": ({"bench"}, {"train"}),
    "jaxdist bench ": ({"step", "scaling", "collectives", "gpu"}, {"train", "gpt_tiny"}),
    "jaxdist train --": ({"--help", "--dry-run", "--target", *EVERY_KNOB}, {"--version", "--cluster", "--prompt"}),
    "jaxdist evaluate runs/a --": ({"--checkpoint", *OF_A_RUN}, EVERY_KNOB - OF_A_RUN),
    "jaxdist lab schedules --": ({"--stages", "--picture", "--json"}, {"--devices", "--mesh"}),
    "jaxdist lab ": ({*LABS, *claims()}, {"gpt_tiny"}),
    "jaxdist lab --": ({"--all"}, {"--output"}),
    "jaxdist lab --all --": ({"--output", "--json"}, {"--all"}),
    "jaxdist completion ": (set(SHELLS), {"train"}),
    "jaxdist nonsense ": (set(), FIRST | EVERY_KNOB),
    "jaxdist train --pipeline.schedule ": (SCHEDULES, {"gpt_tiny", "--mesh"}),
    "jaxdist train --pipeline.schedule=": (SCHEDULES, {"gpt_tiny", "--mesh"}),
    "jaxdist train --pipeline.schedule=z": ({"zb-h1", "zb-u"}, {"1f1b"}),
    "jaxdist train --mesh=data=2 --pipeline.schedule 1": ({"1f1b"}, {"gpipe"}),
    "jaxdist train --cluster.coordinator host:80 --resume ": ({"auto", "never"}, {"gpt_tiny"}),
    "jaxdist train --parallel.micro_batches ": ({"inside", "outside"}, set()),
    "jaxdist explain --model.tied ": ({"true", "false"}, set()),
    "jaxdist explain --parallel.zero ": ({"0", "1", "2", "3"}, set()),
    "jaxdist train --train.steps ": (set(), {"gpt_tiny", "mine.toml", "--mesh"}),
    "jaxdist train ": ({*SHIPPED, "mine.toml", "runs"}, {"text.txt", "--mesh"}),
    "jaxdist train --dry-run ": ({*SHIPPED, "mine.toml"}, {"text.txt"}),
    "jaxdist train --mesh 2x1x1 ": ({*SHIPPED, "mine.toml"}, {"text.txt"}),
    "jaxdist train gpt_tiny ": ({"--mesh", "--dry-run"}, {"gpt_tiny", "mine.toml"}),
    "jaxdist train llama_": ({"llama_1b", "llama_8b"}, {"gpt_tiny"}),
    "jaxdist plan --cluster ": ({*PRESETS, "mine.toml"}, {"gpt_tiny"}),
    "jaxdist explain --target h": ({"h100", "h200"}, {"a100"}),
    "jaxdist evaluate ": ({"runs", "bin"}, {"text.txt", "mine.toml", "gpt_tiny"}),
    "jaxdist evaluate runs/": ({"a"}, set()),
    "jaxdist data te": ({"text.txt"}, {"mine.toml"}),
    "jaxdist data text.txt --": ({"--json", "--data.tokenizer", "--model.sequence"}, {"--mesh", "--data.pack"}),
    "jaxdist generate --checkpoint ": ({"latest", "best"}, set()),
    "jaxdist train --data.path te": ({"text.txt"}, {"mine.toml"}),
    "jaxdist train --data.path=te": ({"text.txt"}, {"mine.toml"}),
    "jaxdist launch slurm --env ": ({"alps", "infiniband", "ethernet", "text.txt"}, set()),
    "jaxdist launch local --processes 2 ": ({*SHIPPED}, {"local"}),
    "jaxdist launch local --processes 2 -- te": ({"text.txt"}, {"gpt_tiny"}),
    "jaxdist launch slurm --time 9 -- mine.py te": ({"text.txt"}, {"gpt_tiny"}),
    "python -m jaxdist ": (FIRST, {"step"}),
    "python -m jaxdist bench st": ({"step"}, {"gpu"}),
    "python -m jaxdist.train --pipeline.schedule ": (SCHEDULES, set()),
    "python3 -u -m jaxdist.bench step --optimizer.name=": ({*UPDATE_RULES}, set()),
    "python mine.py -m jaxdist.": (set(), FIRST),
}


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The scripts as files, as the command prints them."""
    folder = tmp_path_factory.mktemp("scripts")
    for shell in SHELLS:
        with redirect_stdout(io.StringIO()) as said:
            assert main(["completion", shell]) == 0
        (folder / shell).write_text(said.getvalue())
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a few files, and programs that tell if a completion has started them."""
    folder = tmp_path_factory.mktemp("home")
    for name in ("mine.toml", "text.txt"):
        (folder / name).touch()
    (folder / "runs" / "a").mkdir(parents=True)
    (folder / "bin").mkdir()
    for program in ("jaxdist", "python", "python3"):
        (folder / "bin" / program).write_text(f"#!/bin/sh\necho $0 >> {folder}/started\n")
        (folder / "bin" / program).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def answers(scripts, home):
    """What each shell offers on all lines. Those of Python are last: what else a shell knows of it may start it."""

    @cache
    def ask(shell: str) -> dict[str, set[str]]:
        ours = [line for line in LINES if line.startswith("jaxdist")]
        found = offered(shell, scripts / shell, ours, home)
        assert not (home / "started").exists()
        found += offered(shell, scripts / shell, list(LINES)[len(ours) :], home)
        (home / "started").unlink(missing_ok=True)
        last = [{name.rstrip("/").rpartition("/")[2] for name in names if name} for names in found]
        return dict(zip(LINES, last, strict=True))

    return ask


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("line", LINES)
def test_what_a_tab_offers(answers, shell, line):
    needed(shell)
    present, absent = LINES[line]
    found = answers(shell)[line]
    assert present - found == set()
    assert absent & found == set()
    if not present and not line.startswith("python "):
        assert found == set()


@pytest.mark.parametrize("shell", SHELLS)
def test_values_are_exactly_those_of_the_knob(answers, shell):
    needed(shell)
    assert answers(shell)["jaxdist train --pipeline.schedule "] == SCHEDULES
    assert answers(shell)["jaxdist train --pipeline.schedule=z"] == {"zb-h1", "zb-u"}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_those_of_the_help(name, capsys):
    """Which is read here as a user reads it. Of the labs a few."""
    for words in ([name, lab] for lab in ("schedules", "zero-states-4x", "--all")) if name == "lab" else [[name]]:
        if name == "completion":
            continue
        with pytest.raises(SystemExit):
            main([*" ".join(words).split(), "--help"])
        listed = set(re.findall(r"^  (--[\w.-]+)", capsys.readouterr().out, re.MULTILINE))
        command = commands()[" ".join(words)]
        assert listed == {*command.flags, *command.options}
        assert len(listed) > 2


def test_values_are_of_options_that_exist():
    for name, command in commands().items():
        assert command.values.keys() - {""} <= command.options.keys(), name
        assert Values() not in command.values.values()


def test_bash_writes_the_line(scripts, home):
    """At a terminal, with bash's own idea of words."""
    said = home / "said"
    with typing([needed("bash"), "--norc", "-i"], home) as typed:
        typed(f"source {scripts / 'bash'}\n")
        typed("jaxdist() { printf '%s\\n' \"$@\" '--- end' >> said; }\npython() { jaxdist \"$@\"; }\n")
        typed("jaxdist tra\tgpt_\t--pipeline.sche\tint\t--model.remat=dot\t\n")
        wait(said, 1)
        typed("python -m jaxdist.train --data.path te\t--run_d\t./ru\t\n")
        wait(said, 2)
    first, second, _ = said.read_text().split("--- end\n")
    assert first.split() == ["train", "gpt_tiny", "--pipeline.schedule", "interleaved", "--model.remat=dots"]
    assert second.split() == ["-m", "jaxdist.train", "--data.path", "text.txt", "--run-dir", "./runs/"]


@pytest.mark.parametrize("times", [1, 2])
def test_python_is_completed_as_before_where_it_runs_something_else(scripts, home, times):
    before = (
        "theirs() { COMPREPLY=(from-$1-$2); }\ncomplete -F theirs python\n" + f"source {scripts / 'bash'}\n" * times
    )
    lines = ["python mine.py ", "python -m json.tool te", "python -m jaxdist be"]
    assert in_bash(scripts / "bash", lines, home, before) == [["from-x-", ""], ["from-x-te", ""], ["bench", ""]]
