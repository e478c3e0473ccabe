"""A run whose standard streams are lost goes on, and log.txt has all of it; nothing else gets its lines."""

import json
import os
import pty
import re
import subprocess
import sys

import pytest

from jaxdist.output import streams
from jaxdist.output.streams import CONTROL, LogFile, Unfailing, printable
from jaxdist.training.console import Screen
from tests.tiers import exhaustive
from tests.training.conftest import SMALL, over

STAMP = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  "


LOST = ("closed", "full", "ended")


def run_without_streams(lost: str, command: list[str]) -> int:
    """The exit code of `command` where standard output and error are closed, on a full disk, or an ended pipe."""
    options = dict(stdin=subprocess.DEVNULL, timeout=300, check=False)
    if lost == "closed":
        return subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command], **options).returncode
    if lost == "full":
        stream = os.open("/dev/full", os.O_WRONLY)
    else:
        reader, stream = os.pipe()
        os.close(reader)
    try:
        return subprocess.run(command, stdout=stream, stderr=stream, **options).returncode
    finally:
        os.close(stream)


TALKS = """
import os, sys
from jaxdist.cluster import faults
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.request import run

def main(argv):
    with open(argv[0], "w") as file:
        for i in range(3):
            print("output", flush=True)
            print("error", file=sys.stderr, flush=True)
            faults.say(ProcessEnv(), "a fault")
        file.write("its own")
    return 7

run(main, needs_output=False)
"""


@pytest.mark.parametrize("lost", LOST)
def test_a_program_goes_on_without_its_streams_and_its_files_get_none_of_it(tmp_path, lost):
    assert run_without_streams(lost, [sys.executable, "-c", TALKS, str(tmp_path / "file")]) == 7
    assert (tmp_path / "file").read_text() == "its own"


@pytest.mark.parametrize("lost", ["full", "ended"])
def test_a_result_that_is_lost_is_a_failure(lost):
    program = "from jaxdist.request import run\nrun(lambda argv: print('the result') or 0)"
    assert run_without_streams(lost, [sys.executable, "-c", program]) != 0


FOREIGN = "a\tb\x1b[2J\x9b1m\x07\r\x7f\u202e\r\n\ud800 ö"
"""Text of a file that would clear a terminal, ring it, and turn the order of what follows; and half a character."""

ESCAPED = "a\tb\\u001b[2J\\u009b1m\\u0007\\u000d\\u007f\\u202e\r\n\\ud800 ö"

PRINTS = """
import sys
from jaxdist.config import RequestError
from jaxdist.request import run

def main(argv):
    print({text})
    print({text}, file=sys.stderr)
    raise RequestError({text})

run(main, needs_output={needs_output})
"""


@pytest.mark.parametrize("needs_output", [True, False])
def test_control_characters_of_files_are_written_as_escapes(needs_output):
    program = PRINTS.format(text=ascii(FOREIGN), needs_output=needs_output)
    run = subprocess.run([sys.executable, "-X", "utf8", "-c", program], capture_output=True, timeout=300, check=False)
    assert run.returncode == 2
    assert run.stdout == f"{ESCAPED}\n".encode()
    assert run.stderr == f"{ESCAPED}\njaxdist: {ESCAPED}\n".encode()


def test_what_is_json_stays_json():
    text = json.dumps({"a": FOREIGN.replace("\ud800", "")}, ensure_ascii=False)
    assert json.loads(printable(text)) == json.loads(text)
    assert CONTROL.search(printable(text)) is None


def test_a_screen_draws_its_bar_and_prints_what_is_printable():
    leader, follower = pty.openpty()
    screen = Screen(Unfailing(follower, "utf-8"))
    screen.say(FOREIGN)
    screen.move("steps", 1, 2, "")
    screen.pause()
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert "\\u001b[2J" in shown
    assert "\x1b[2J" not in shown
    assert "\x1b[" in shown, "no bar"


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["ended", *exhaustive([("closed",), ("full",)])])
def test_training_goes_on_without_its_streams(text, tmp_path, lost):
    argv = over(SMALL, f"--data.path={text}", f"--run-dir={tmp_path / 'run'}", "--train.steps=3")
    command = [sys.executable, "-m", "jaxdist.train", *argv]
    code = run_without_streams(lost, command)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert code == 0, log
    for line in ("versions", "step 1/3  loss", "step 3/3  loss", "step 3  validation loss", "done"):
        assert re.search(f"^{STAMP}{line}", log, re.MULTILINE), log


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["ended", *exhaustive([("closed",), ("full",)])])
def test_a_launched_job_goes_on_without_its_streams(text, tmp_path, lost):
    argv = over(SMALL, f"--data.path={text}", f"--run-dir={tmp_path / 'run'}", "--train.steps=3", "--mesh=2x1x1")
    command = [sys.executable, "-m", "jaxdist.launch", "local", "--processes=2", *argv]
    code = run_without_streams(lost, command)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert code == 0, log
    assert "step 3/3  loss" in log


def test_a_stream_takes_any_text(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        stream = Unfailing(file.fileno(), "ascii")
        print("naïve \udcff", file=stream)
        assert (stream.isatty(), stream.fileno(), stream.encoding) == (False, file.fileno(), "ascii")
    assert (tmp_path / "file").read_text() == "na\\xefve \\udcff\n"


def lines(path):
    """Of a log, without their times."""
    found = path.read_text().splitlines()
    assert all(re.match(STAMP, line) for line in found)
    return [line[len("2026-11-23T13:24:05Z  ") :] for line in found]


def test_a_log_keeps_what_comes_before_its_file_and_writes_plain_lines(tmp_path):
    log = LogFile()
    log.write("early\nlines")
    log.open(tmp_path / "log.txt", rotates=True)
    log.write("a \x1b[31mred\x1b[0m line\r\x07")
    log.close()
    assert lines(tmp_path / "log.txt") == ["early", "lines", r"a \u001b[31mred\u001b[0m line", r"\u0007"]
    again = LogFile()
    again.open(tmp_path / "log.txt", rotates=True)
    again.write("more")
    again.close()
    assert lines(tmp_path / "log.txt")[-1] == "more"


@pytest.mark.parametrize("rotates", [True, False])
def test_a_long_log_is_begun_anew_and_one_older_is_kept(tmp_path, monkeypatch, rotates):
    monkeypatch.setattr(streams, "LARGEST", 200)
    log = LogFile()
    log.open(tmp_path / "log.txt", rotates)
    for number in range(20):
        log.write(f"line {number:02}")  # 30 bytes
    log.close()
    if rotates:
        assert sorted(os.listdir(tmp_path)) == ["log.txt", "log.txt.1"]
        kept = lines(tmp_path / "log.txt.1") + lines(tmp_path / "log.txt")
        assert kept == [f"line {number:02}" for number in range(20 - len(kept), 20)]
        assert len(lines(tmp_path / "log.txt.1")) == 7
    else:
        assert lines(tmp_path / "log.txt") == [f"line {number:02}" for number in range(20)]


def test_a_log_that_cannot_be_written_is_tried_again_with_each_line(tmp_path):
    path = tmp_path / "log.txt"
    path.symlink_to(tmp_path / "outside")
    log = LogFile()
    log.open(path, rotates=True)
    log.write("lost")
    assert log.problem == "Too many levels of symbolic links"
    assert not (tmp_path / "outside").exists()
    path.unlink()
    log.write("kept")
    log.close()
    assert (log.problem, lines(path)) == (None, ["kept"])
