"""Commands on run folders that are damaged, cut off, or made by somebody who means harm.

Each gets a sentence, or does its work; never a traceback. Nothing outside the folder is touched, and no step that Orbax
has committed is removed.
"""

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxdist import checkpoints, evaluate, generate, train
from jaxdist.config import RequestError
from jaxdist.doctor.__main__ import main as doctor
from tests.tiers import thinned
from tests.training import curves
from tests.training.conftest import SMALL, over

Damage = Callable[[Path, Path], object]
"""What is done to a run folder; the second folder lies outside of it."""


def write(name: str, content: str | bytes) -> Damage:
    def apply(run: Path, outside: Path) -> None:
        remove(name)(run, outside)
        (run / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return apply


def remove(name: str) -> Damage:
    def apply(run: Path, outside: Path) -> None:
        path = run / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    return apply


def fifo(name: str) -> Damage:
    def apply(run: Path, outside: Path) -> None:
        remove(name)(run, outside)
        os.mkfifo(run / name)

    return apply


def folder(name: str) -> Damage:
    def apply(run: Path, outside: Path) -> None:
        remove(name)(run, outside)
        (run / name).mkdir(parents=True)

    return apply


def link(name: str, to: str) -> Damage:
    """What was there lies outside now, and a link leads to it."""

    def apply(run: Path, outside: Path) -> None:
        if (run / name).exists():
            (run / name).replace(outside / to)
        (run / name).symlink_to(outside / to)

    return apply


def seals(change: Callable[[dict], object]) -> Damage:
    def apply(run: Path, outside: Path) -> None:
        for path in run.rglob("sums/*.json"):
            content = json.loads(path.read_text())
            change(content)
            path.write_text(json.dumps(content))

    return apply


def copied(run: Path, outside: Path) -> None:
    """Step 20 under the name 30, with its checksums."""
    shutil.copytree(run / "checkpoints/20", run / "checkpoints/30")
    shutil.copy(run / "checkpoints/sums/20.json", run / "checkpoints/sums/30.json")


def strangers(run: Path, outside: Path) -> None:
    for name in ("²", "9" * 30, "007", "x.orbax-checkpoint-tmp"):
        (run / "checkpoints" / name).mkdir()
    (run / "checkpoints" / "7").write_text("a file")


DEEP = "[" * 200_000

REFUSED: dict[str, tuple[Damage, str]] = {
    "checkpoints is a link": (link("checkpoints", "kept"), "checkpoints is a symbolic link to "),
    "sums is a link": (link("checkpoints/sums", "kept"), "checkpoints/sums is a symbolic link to "),
    "aside is a link": (link("checkpoints/aside", "kept"), "checkpoints/aside is a symbolic link to "),
    "best is a link": (link("checkpoints/best", "kept"), "checkpoints/best is a symbolic link to "),
    "a step is a link": (link("checkpoints/20", "kept"), "checkpoints/20 is a symbolic link to "),
    "heartbeats is a link": (link("heartbeats", "kept"), "heartbeats is a symbolic link to "),
    "config is a link": (link("config.toml", "kept"), "config.toml is a symbolic link to "),
    "metrics is a link": (link("metrics.jsonl", "kept"), "metrics.jsonl is a symbolic link to "),
    "tokenizer is a link": (link("tokenizer.json", "kept"), "tokenizer.json is a symbolic link to "),
    "the picture is a link": (link("loss.png", "kept"), "loss.png is a symbolic link to "),
    "the log is a link": (link("log.txt", "kept"), "log.txt is a symbolic link to "),
    "the older log is a FIFO": (fifo("log.txt.1"), "log.txt.1 is a FIFO, a socket or a device"),
    "checkpoints is a file": (write("checkpoints", "x"), "checkpoints is a file, not a folder"),
    "sums is a file": (write("checkpoints/sums", "x"), "checkpoints/sums is a file, not a folder"),
    "best is a FIFO": (fifo("checkpoints/best"), "checkpoints/best is a FIFO, a socket or a device"),
    "metrics is a FIFO": (fifo("metrics.jsonl"), "metrics.jsonl is a FIFO, a socket or a device"),
    "metrics is a folder": (folder("metrics.jsonl"), "metrics.jsonl is a folder, not a file"),
    "environment is a folder": (folder("environment.json"), "environment.json is a folder, not a file"),
    "a seal is a FIFO": (fifo("checkpoints/sums/20.json"), "checkpoints/sums/20.json is a FIFO"),
    "a seal is a folder": (folder("checkpoints/sums/20.json"), "checkpoints/sums/20.json is a folder, not a file"),
    "a seal is a link": (link("checkpoints/best/sums/20.json", "kept"), "checkpoints/best/sums/20.json is a symbolic"),
    "run.json is a FIFO": (fifo("run.json"), "run.json is a FIFO, a socket or a device"),
}
"""Damage for which every command refuses the folder, and what it says."""

CONFIG: dict[str, tuple[Damage, str]] = {
    "no config": (remove("config.toml"), "config.toml"),
    "config is a FIFO": (fifo("config.toml"), "config.toml"),
    "config is a folder": (folder("config.toml"), "config.toml"),
    "config is binary": (write("config.toml", bytes(range(256))), "config.toml"),
    "config is deep": (write("config.toml", f"a = {DEEP}"), "config.toml"),
    "config of other keys": (write("config.toml", "[model]\nwidth = 3\n"), "config.toml"),
}
"""The same, each command in its own words."""

USABLE: dict[str, Damage] = {
    "no seals": remove("checkpoints/sums"),
    "seals torn": write("checkpoints/sums/20.json", '{"xxh3_64": {"para'),
    "seal deep": write("checkpoints/sums/20.json", DEEP),
    "seal lists nothing": seals(lambda seal: seal.update(xxh3_64={})),
    "seal lists paths elsewhere": seals(lambda seal: seal["xxh3_64"].update({"../../../../etc/passwd": [1, "0"]})),
    "seals of another run": seals(lambda seal: seal.update(run="0" * 32)),
    "seals of odd types": seals(lambda seal: seal.update(run=[1], step={}, finite="yes")),
    "seals of the first format": seals(lambda seal: [seal.pop(name) for name in ("run", "step", "finite")]),
    "run.json lost": remove("run.json"),
    "run.json torn": write("run.json", '{"id": '),
    "run.json of odd types": write("run.json", '{"id": [7]}'),
    "a copy under another number": copied,
    "odd names in checkpoints": strangers,
    "a file that is not listed": write("checkpoints/20/params/planted", "x"),
    "a file of the step is a link": link("checkpoints/20/params/_METADATA", "kept"),
    "a file of the step is a FIFO": fifo("checkpoints/20/params/_METADATA"),
    "facts are no table": write("checkpoints/20/facts/metadata", "[1, 2]"),
    "facts are a FIFO": fifo("checkpoints/20/facts/metadata"),
    "metrics with one bad byte": write("metrics.jsonl", b'{"step": 1, "loss": 2.0}\n{"step": 2, "\xff": 1}\n'),
    "metrics with a deep line": write("metrics.jsonl", '{"step": 1, "loss": 2.0}\n' + DEEP + "\n"),
    "metrics empty": write("metrics.jsonl", ""),
    "metrics lost": remove("metrics.jsonl"),
    "metrics of odd types": write("metrics.jsonl", '{"step": "x", "loss": []}\n[]\n7\n'),
    "heartbeats of odd types": write("heartbeats/0.json", '{"process": "x"}'),
    "heartbeats deep": write("heartbeats/0.json", DEEP),
    "heartbeat is a FIFO": fifo("heartbeats/0.json"),
    "tokenizer torn": write("tokenizer.json", '{"version": "1.0", '),
    "no tokenizer": remove("tokenizer.json"),
    "a link with the name of a half-written step": link("checkpoints/25.orbax-checkpoint-tmp", "kept"),
    "picture lost": remove("loss.png"),
}
"""Damage with which some commands do their work and others say what is wrong."""

OPTIONS = over(SMALL, "--checkpoint.every=10", "--validation.every=20")


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> Path:
    """Steps 10 and 20, which is the best, too."""
    run = tmp_path_factory.mktemp("runs") / "finished"
    assert train.main([*OPTIONS, f"--data.path={text}", f"--run-dir={run}"]) == 0
    return run


@pytest.fixture
def damaged(finished, tmp_path):
    """A copy of `finished` after some damage, and a folder outside of it with its content."""

    def make(damage: Damage) -> tuple[Path, Path]:
        run = Path(shutil.copytree(finished, tmp_path / "run"))
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "kept").mkdir()
        (outside / "kept" / "file").write_text("kept")
        if damage.__qualname__.startswith("link"):  # what is moved there takes its place
            shutil.rmtree(outside / "kept")
        damage(run, outside)
        return run, outside

    return make


def content(folder: Path) -> dict[str, bytes | None]:
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*")}
    return {name: path.read_bytes() if path.is_file() else None for name, path in files.items()}


def committed(run: Path) -> set[int]:
    """The steps that Orbax has committed, wherever they are moved to: the inodes of a file of each."""
    files = (run / "checkpoints").rglob("_CHECKPOINT_METADATA")
    return {path.stat().st_ino for path in files if re.fullmatch("[0-9]+", path.parent.name)}


COMMANDS = {
    "list": lambda run, text: checkpoints.main([str(run)]),
    "verify": lambda run, text: checkpoints.main([str(run), "--verify"]),
    "prune": lambda run, text: checkpoints.main([str(run), "--prune"]),
    "doctor": lambda run, text: doctor([str(run)]),
    "train": lambda run, text: train.main([*OPTIONS, f"--data.path={text}", f"--run-dir={run}"]),
    "evaluate": lambda run, text: evaluate.main([str(run)]),
    "generate": lambda run, text: generate.main([str(run), "--tokens=1", "--prompt=mesh"]),
}


def outcome(command: str, run: Path, text: Path, capsys) -> tuple[int, str]:
    """Exit code, and what was said. An exception that is no `RequestError` is a traceback, and fails the test."""
    try:
        code = COMMANDS[command](run, text)
        said = ""
    except RequestError as error:
        code, said = 2, str(error)
    captured = capsys.readouterr()
    return code, said + captured.out + captured.err


@pytest.mark.parametrize(("kind", "command"), thinned(itertools.product([*REFUSED, *CONFIG], COMMANDS), 5))
def test_a_folder_of_another_layout_is_refused(damaged, finished, text, capsys, kind, command):
    damage, told = {**REFUSED, **CONFIG}[kind]
    run, outside = damaged(damage)
    before = content(outside), committed(run)
    code, said = outcome(command, run, text, capsys)
    assert (code, told in said) == (2, True), said
    assert (content(outside), committed(run)) == before


MARKS = {"train": pytest.mark.slow, "evaluate": pytest.mark.slow, "generate": pytest.mark.exhaustive}
"""Of commands that compile; `generate` reads a folder as `evaluate` does."""

CASES = [pytest.param(kind, command, marks=MARKS.get(command, ())) for kind in USABLE for command in COMMANDS]


@pytest.mark.parametrize(("kind", "command"), CASES)
def test_damage_is_said_or_mended_and_nothing_is_lost(damaged, text, capsys, kind, command):
    run, outside = damaged(USABLE[kind])
    before = content(outside), committed(run)
    code, said = outcome(command, run, text, capsys)
    assert code in (0, 1, 2)
    assert said, "every outcome has its sentence"
    assert content(outside) == before[0]
    assert committed(run) >= before[1], "a step is gone"
    if command == "verify":
        assert (code == 1) == (kind in UNVERIFIED), said


UNVERIFIED = [kind for kind in USABLE if kind.startswith(("no seals", "seal", "a copy", "a file", "facts"))]
UNVERIFIED.remove("seals of the first format")


def metrics(change: Callable[[list[bytes]], list[bytes]]) -> Damage:
    def apply(run: Path, outside: Path) -> None:
        path = run / "metrics.jsonl"
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return apply


METRICS: dict[str, tuple[Damage, str]] = {
    "one bad byte": (metrics(lambda lines: [*lines[:4], b'{"\xff": 1}\n', *lines[4:]]), "left out 1 line of "),
    "a deep line": (metrics(lambda lines: [*lines[:4], DEEP.encode() + b"\n", *lines[4:]]), "left out 1 line of "),
    "lines of odd types": (
        metrics(lambda lines: [b"[]\n", b"7\n", b'{"step": "x"}\n', b'{"step": 3, "loss": []}\n', b"\n", *lines]),
        "left out 5 lines of ",
    ),
    "doubled": (metrics(lambda lines: [*lines, *lines]), "whose step appears again later"),
    "a gap": (metrics(lambda lines: [*lines[:2], *lines[6:]]), "has no lines of steps 3 to 6"),
    "no line at all": (metrics(lambda lines: []), "has no lines of steps 1 to 10"),
    "lost": (remove("metrics.jsonl"), "has no lines of steps 1 to 10"),
    "half a line": (metrics(lambda lines: [*lines[:10], b'{"step": 11, "lo']), ""),
}
"""Damage, and what a run says of it that goes on from step 10."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "doubled")) for kind in METRICS]
)
def test_a_run_goes_on_whatever_its_metrics_are_and_each_step_stands_once(damaged, text, capsys, kind):
    damage, told = METRICS[kind]
    run, _ = damaged(damage)
    for name in ("20", "sums/20.json", "best"):
        remove(f"checkpoints/{name}")(run, run)
    remove("loss.png")(run, run)
    argv = over(OPTIONS, f"--data.path={text}", f"--run-dir={run}", "--validation.every=10")  # and that of 10 is due
    assert train.main(argv) == 0
    said = capsys.readouterr().err
    assert told in said
    assert ("left out" in said or "has no lines" in said) == bool(told)
    found = curves.lines(run)
    steps = [line["step"] for line in found if "loss" in line]
    missing = {"a gap": {3, 4, 5, 6}, "no line at all": set(range(1, 11)), "lost": set(range(1, 11))}.get(kind, set())
    assert steps == [step for step in range(1, 21) if step not in missing]
    assert [line["step"] for line in found if "validation_loss" in line] == [10, 20]
    assert (run / "loss.png").exists()
