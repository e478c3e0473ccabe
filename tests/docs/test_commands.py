"""Pages use what there is: options that their command has, keys that are knobs, functions with these arguments."""

import ast
import importlib
import inspect
import re
import tomllib
from functools import cache

import pytest

import jaxdist
from jaxdist.api.fit_options import NAMES
from jaxdist.completion.table import commands
from jaxdist.request.knobs import KNOBS
from tests.test_docs import PAGES, ROOT, name

FENCED = re.compile(r"^(`{3,})([^`\n]*)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)

OF_OTHERS = {
    "docker": {"--ipc", "--shm-size"},
    "pytest": {"--exhaustive", "--touched"},
    "scripts": {"--check", "--jaxdist", "--table"},  # of scripts/ and benchmarks/
    "Slurm": {
        "--exclusive",
        "--gpus-per-task",
        "--kill-on-bad-exit",
        "--mincpus",
        "--ntasks-per-node",
        "--signal",
        "--wait",
    },
}
"""Options that stand alone in a sentence, and are of other programs."""

WRONG_ON_PURPOSE = {("train", "--modle.layers")}

CALL = re.compile(r"(?:-m jaxdist[. ]|(?:^|\$ |&& |\| )jaxdist )([a-z].*)")
END = re.compile(r",? (?:#|&&|\||>|;|and|--) |, ")
"""What ends a command within a line; after `--` stands another program."""


@cache
def known() -> dict[str, set[str]]:
    """The options of every command."""
    return {name: {*command.flags, *command.options} for name, command in commands().items()}


def code_of(text: str) -> tuple[list[str], list[str]]:
    """The lines of the blocks of a page, without diffs, and the code within its sentences."""
    text = text.replace("\\\n", " ")
    lines = [line for _, language, block in FENCED.findall(text) if language != "diff" for line in block.split("\n")]
    prose = re.sub(r"<!--.*?-->", "", FENCED.sub("", text), flags=re.DOTALL)
    return lines, [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]


def name_of(option: str) -> str:
    """An option without its value, and with hyphens."""
    return "--" + re.split("[= ]", option[2:])[0].replace("_", "-")


def unknown_options(text: str) -> list[str]:
    """The options of a page that no command has, or not the one before them."""
    lines, spans = code_of(text)
    found = []
    for line in lines + spans:
        for call in CALL.findall(line):
            words = END.split(call)[0].split()
            command = next(name for name in (" ".join(words[:2]), words[0], "") if name in known())
            options = {name_of(word) for word in words[1:] if re.match(r"--\w", word)}
            if command == "lab --all":
                options.remove("--all")
            for option in sorted(options - known()[command]):
                if (command, option) not in WRONG_ON_PURPOSE:
                    found.append(f"{command} {option}")
    anywhere = set.union({"--all"}, *known().values(), *OF_OTHERS.values())
    alone = [span for span in spans if re.match(r"--[a-z]", span) and not span.startswith("--xla_")]
    return found + [span for span in alone if name_of(span) not in anywhere]


def test_every_option_is_one_of_its_command():
    assert {name(page): found for page in PAGES if (found := unknown_options(page.read_text()))} == {}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```sh\npython -m jaxdist.plan llama_1b --devices 8 --prompt x\n```\n", ["plan --prompt"]),
        ("```\n$ jaxdist bench step gpt_tiny \\\n    --mesh 2x1x1 --repeat=3\n```\n", ["bench step --repeat"]),
        ("Use `python -m jaxdist.launch slurm --nodse 2`.", ["launch slurm --nodse"]),
        ("Use `--run-dirs x` or `--run_dir`.", ["--run-dirs x"]),
        ("`python -m jaxdist.train --train.steps 5 --run-dir x`, then `jaxdist lab --all --output x`", []),
    ],
)
def test_an_option_that_is_gone_is_found(text, found):
    assert unknown_options(text) == found


def keys(table: dict, before: str = "") -> list[str]:
    """The keys of a TOML file, with the names of their tables."""
    found = []
    for key, value in table.items():
        found += keys(value, f"{before}{key}.") if isinstance(value, dict) else [before + key]
    return found


def test_a_configuration_on_a_page_has_knobs():
    """The other TOML files on pages are no configurations of jaxdist, or outputs."""
    blocks = []
    for page in PAGES:
        blocks += [block for _, language, block in FENCED.findall(page.read_text()) if language == "toml"]
    configurations = [keys(tomllib.loads(block)) for block in blocks if "[model]" in block]
    assert len(configurations) == 1
    assert [key for key in configurations[0] if key not in KNOBS] == []


def test_no_page_is_left_out():
    wanted = {ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")}
    assert wanted <= set(PAGES)


def found_by(dotted: str):
    """What a name of jaxdist means, such as `jaxdist.data.open`; None for one that there is not."""
    first, *others = dotted.split(".")
    found = importlib.import_module(first)
    for one in others:
        found = getattr(found, one, None)
    return found


def wrong_calls(program: str) -> list[str]:
    """The names of jaxdist that a program uses and that are not there, and arguments that they do not have."""
    found = []
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "jaxdist":
            module = importlib.import_module(node.module)
            found += [alias.name for alias in node.names if not hasattr(module, alias.name)]
        if not isinstance(node, ast.Call) or not ast.unparse(node.func).startswith("jaxdist."):
            continue
        function = found_by(ast.unparse(node.func))
        known_arguments = set(inspect.signature(function).parameters) if function else set()
        if function is jaxdist.fit:
            known_arguments.update(NAMES)
        found += [] if function else [node.func.attr]
        found += [f"{node.func.attr}({word.arg})" for word in node.keywords if word.arg not in known_arguments]
    return found


def test_python_on_a_page_calls_what_there_is():
    """Also in the parts of programs that are shown and not run."""
    found = []
    for page in PAGES:
        for _, language, block in FENCED.findall(page.read_text()):
            if language == "python":
                found += [f"{name(page)}: {call}" for call in wrong_calls(block)]
    assert found == []


def test_a_call_of_what_is_gone_is_found():
    program = "from jaxdist.mesh import gone\nt = jaxdist.parallelize(M, loss, opt, mehs='1x1x1')\njaxdist.lost(1)\n"
    assert sorted(wrong_calls(program)) == ["gone", "lost", "parallelize(mehs)"]
