"""The command line: spellings, extras, help and its speed, exit codes, the list of commands."""

from __future__ import annotations

import importlib.util
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest

from jaxdist.__main__ import COMMANDS, main
from jaxdist.config import RequestError
from jaxdist.config.values import Count
from jaxdist.optimizers.table import UPDATE_RULES
from jaxdist.request import Extra, arguments, load, outcome, to_toml
from jaxdist.request.knobs import KNOBS, option


def ask(*argv: str, **more):
    return arguments(list(argv), "train", "Trains.", **more)


@pytest.mark.parametrize("argv", [("--mesh", "-1x1x1"), ("--mesh=-1x1x1",), ("--mesh", "data=-1"), ("--mesh=data=-1",)])
def test_values_with_hyphens_and_equals(argv):
    assert ask(*argv).config.mesh == argv[-1].removeprefix("--mesh=")


@pytest.mark.parametrize("name", ["--train.global-batch-size", "--train.global_batch_size"])
def test_hyphens_and_underscores(name):
    asked = ask("gpt_tiny", name, "32", "--model.tied", "false")
    assert asked.config.train.global_batch_size == 32
    assert not asked.config.model.tied
    assert asked.overrides == {"train.global_batch_size": "32", "model.tied": "false"}
    assert asked.positional == "gpt_tiny"


def test_an_empty_value():
    for argv in ("--parallel.rules.vocab", ""), ("--parallel.rules.vocab=",):
        assert ask(*argv, "--mesh", "1x2x1").config.parallel.rules.vocab == ""


def test_extras():
    extras = [Extra("json", False, "JSON"), Extra("max_tokens", 5, "tokens", Count), Extra("prompt", "", "text")]
    assert ask(extras=extras).extras == {"json": False, "max_tokens": 5, "prompt": ""}
    asked = ask("--json", "gpt_tiny", "--max-tokens", "7", "--prompt", "-1 is", extras=extras)
    assert asked.extras == {"json": True, "max_tokens": 7, "prompt": "-1 is"}
    assert asked.positional == "gpt_tiny"


def test_run_folder_that_was_moved(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(load("gpt_tiny", {"model.layers": "3"})))
    argv = [str(tmp_path), "--mesh", "1x2x1", "--parallel.zero", "3", "--parallel.rules.vocab="]
    config = arguments(argv, "evaluate", "", positional="RUN").config
    assert (config.model.layers, config.mesh, config.run_dir) == (3, "1x2x1", tmp_path)
    assert (config.parallel.zero, config.parallel.rules.vocab) == (3, "")


@pytest.mark.parametrize("columns", [72, 80, 200])
def test_help_tells_everything_in_its_width(capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as stop:
        ask("--layers", "--help", extras=[Extra("json", False, "Print JSON."), Extra("max_tokens", 5, "How many.")])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= min(columns, 120)
    for part in [*map(option, KNOBS), "usage: python -m jaxdist.train [CONFIG]", "--json ", "--max-tokens int"]:
        assert part in text
    words = " ".join(text.split())
    assert f"{'|'.join(UPDATE_RULES)} Update rule; sgd has momentum. (default adamw)" in words
    assert "Decoder blocks (L). (default 4)" in words
    assert "--parallel.zero 0|1|2|3 ZeRO" in words
    assert "parallel.rules: Mesh axis that shards" in words


def test_help_breaks_choices_that_are_longer_than_a_line(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "72")
    choices = [f"choice-{number}" for number in range(12)]
    with pytest.raises(SystemExit):
        ask("--help", extras=[Extra("way", choices[0], "Which way.", Literal[tuple(choices)])])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 72
    assert f"--way {'|'.join(choices)} Which way." in " ".join(text.replace("|\n", "|").split()).replace("| ", "|")


def test_help_leaves_out_what_a_command_does_not_use(capsys):
    with pytest.raises(SystemExit):
        arguments(["-h"], "evaluate", "", positional="RUN")
    text = capsys.readouterr().out
    assert "evaluate RUN" in text
    assert "--mesh" in text
    assert "--optimizer" not in text


def test_help_is_fast():
    """In seconds of the processor, because those of the clock also go to the other programs of a busy machine."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "jaxdist.train", "--help"], check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < 2.0  # four times what is promised


def test_parsing_imports_nothing_heavy(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    code = (
        "import sys, jaxdist.__main__; from jaxdist.request import arguments; "
        f"arguments(['--data.path', {str(tmp_path / 'text.txt')!r}, '--mesh', '2x1x1'], 'train', ''); "
        "print([name for name in ('jax', 'flax', 'numpy', 'tokenizers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_outcomes_become_exit_codes(capsys):
    def raising(error: BaseException):
        def command(argv: list[str]) -> int:
            raise error

        return command

    assert outcome(lambda argv: len(argv), ["a"] * 85) == 85
    assert outcome(raising(RequestError("One is wrong.", "Two is wrong.")), []) == 2
    assert capsys.readouterr().err == f"{__name__}: One is wrong.\n{__name__}: Two is wrong.\n"
    assert outcome(raising(KeyboardInterrupt()), []) == 85
    assert capsys.readouterr().err == f"{__name__}: interrupted\n"
    with pytest.raises(ZeroDivisionError):
        outcome(raising(ZeroDivisionError()), [])


@pytest.mark.parametrize("positional", ["CONFIG", "RUN"])
def test_an_empty_argument_is_not_the_current_folder(positional, tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match=r"^(config|RUN) is empty; "):
        arguments([""], "train", "", positional=positional)


def test_a_config_may_be_a_link_but_no_pipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text("model.layers = 3")
    (tmp_path / "link.toml").symlink_to("my.toml")
    os.mkfifo(tmp_path / "fifo")
    assert ask("link.toml").config.model.layers == 3
    with pytest.raises(RequestError, match=r"^config fifo cannot be read: not a regular file$"):
        ask("fifo")


def test_a_wrong_request_ends_with_2(capsys):
    assert main(["train", "--mesh", "2x2", "--model.layrs", "3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    first, second = err.splitlines()
    assert first.startswith("jaxdist.train: unknown option --model.layrs")
    assert second.startswith("jaxdist.train: mesh '2x2'")


def test_list_of_commands(capsys):
    assert main([]) == main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("jaxdist 0.")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command):
    assert importlib.util.find_spec(f"jaxdist.{command.split()[0]}")


def test_unknown_command(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "jaxdist: unknown command 'trian'; did you mean 'train'?\n"


def test_forwarding(capsys):
    assert main(["train", "--mesh", "2x2"]) == 2
    assert capsys.readouterr().err.startswith("jaxdist.train: mesh '2x2'")


def test_configs_are_in_the_package():
    package = Path(importlib.util.find_spec("jaxdist").origin).parent
    names = {
        *("cnn_digits", "gpt_tiny", "gpt2_124m", "llama_1b", "llama_3b", "llama_8b", "llama_70b"),
        *("llama2_7b", "llama31_8b", "llama31_70b", "llama32_1b", "llama32_3b", "mistral_7b", "tinyllama_11b"),
        *("phi4_14b", "gemma3_1b", "gemma3_27b"),
        *("deepseek_v3_671b", "mixtral_8x7b", "moe_tiny", "olmoe_1b_7b", "qwen3_30b_a3b"),
        *("qwen25_05b", "qwen25_7b", "qwen3_06b", "qwen3_4b", "qwen3_8b", "smollm2_135m", "smollm2_17b"),
        *("apertus_70b", "gptoss_20b", "gptoss_120b"),
        *("apertus_8b", "olmo2_7b", "pythia_160m", "smollm3_3b"),
    }
    assert {path.name for path in (package / "configs").iterdir()} == {"clusters", *(f"{name}.toml" for name in names)}


def test_every_measurement_is_listed(capsys):
    """`python -m jaxdist` names what `python -m jaxdist.bench` has."""
    from jaxdist.__main__ import main as listing
    from jaxdist.bench.__main__ import MEASUREMENTS

    assert listing([]) == 0
    said = capsys.readouterr().out
    assert MEASUREMENTS
    assert [name for name in MEASUREMENTS if f"  bench {name} " not in said] == []
