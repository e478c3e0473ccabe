"""What stands behind `--` on the command line of a launcher: a program, or one sentence about what is wrong."""

import re
from pathlib import Path

import pytest

from jaxdist import launch
from jaxdist.cluster.program import Program
from jaxdist.config import RequestError


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """A folder with a script, a package and something that is no script."""
    monkeypatch.chdir(tmp_path)
    Path("my train.py").write_text("raise SystemExit('it was run')")
    Path("broken.py").write_text("a = 1\nb = (\n")
    Path("binary.py").write_bytes(b"\xff\xfe\x00")
    Path("mine").mkdir()
    Path("mine/__init__.py").write_text("raise SystemExit('it was run')")
    Path("mine/main.py").touch()


@pytest.mark.parametrize(
    ("words", "name", "script"),
    [
        (["my train.py", "--mesh", "2x1x1"], "my train", "my train.py"),
        (["-X", "dev", "-u", "-Werror", "my train.py"], "my train", "my train.py"),
        (["-m", "mine.main", "-m", "x"], "main", None),
        (["-umjson.tool"], "tool", None),
        (["-m", "unittest"], "unittest", None),
        (["-c", "print()"], "python", None),
    ],
)
def test_programs(words, name, script):
    assert Program.of(words) == Program(tuple(words), name, script and Path(script))


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        ([], "-- is followed by no program; write -- my_train.py --its-options"),
        (["-u"], "-- is followed by no program"),
        (["-m"], "-m is the last word behind --, and needs a value"),
        (["absent.py"], "there is no script 'absent.py' in /"),
        (["/absent.py"], "there is no script '/absent.py'; behind"),
        (["python3.11", "my train.py"], "python3.11 is no script; leave it out, since the launcher starts its own"),
        (["mine"], "'mine' behind -- is a folder without a __main__.py"),
        (["broken.py"], "broken.py line 2 is not Python: '(' was never closed"),
        (["binary.py"], "binary.py is not Python"),
        (["-m", "mine"], "mine is a package without a __main__.py"),
        (["-m", "mine.absent"], "there is no module 'mine.absent' for -m mine.absent"),
        (["-m", "absent.main"], "there is no module 'absent' for -m absent.main"),
        (["--processes", "2"], "--processes stands behind --, where a program begins"),
        (["-y", "my train.py"], "-y stands behind --"),
    ],
)
def test_what_is_no_program(words, fragment):
    with pytest.raises(RequestError, match=re.escape(fragment)):
        Program.of(words)


@pytest.mark.parametrize(
    ("argv", "fragment"),
    [
        (["--processes=2", "my train.py"], "my train.py is a script and not a CONFIG: write -- before it"),
        (["--", "my train.py", "--processes=2"], "--processes=2 stands behind --, where all belongs to my train"),
        (["--", "my train.py"], "--processes is missing"),
        (["--processes=2", "--mesh=2x1x1", "--", "my train.py"], "--mesh cannot stand before the --: what runs is my"),
        (["--processes=2", "gpt_tiny", "--", "my train.py"], "unexpected argument 'gpt_tiny'"),
        (["--proceses=2", "--", "my train.py"], "did you mean '--processes'?"),
        (["--processes=2", "--"], "-- is followed by no program"),
    ],
)
def test_what_stands_on_the_wrong_side(argv, fragment, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    with pytest.raises(RequestError, match=re.escape(fragment)):
        launch.main(["local", *argv])


def test_the_exit_code_and_the_words_of_a_script(capfd):
    Path("my train.py").write_text("import os, sys; print(sys.argv[1:], os.environ['JAX_PROCESS_ID']); sys.exit(4)")
    assert launch.main(["local", "--processes=2", "--", "my train.py", "a b", "--processes=3"]) == 4
    shown = capfd.readouterr()
    first, second = sorted(shown.out.splitlines(), key=len)
    assert first == "['a b', '--processes=3'] 0"
    assert second.endswith("process 1] ['a b', '--processes=3'] 1")
    assert shown.err.endswith("ended with exit code 4; that is not tried again\n")


def test_a_module_in_this_folder(capfd):
    Path("mine/__init__.py").write_text("")
    Path("mine/main.py").write_text("import sys; print(sys.argv[1:], __name__)")
    assert launch.main(["local", "--processes=1", "--", "-X", "utf8", "-m", "mine.main", "--help"]) == 0
    assert capfd.readouterr().out == "['--help'] __main__\n"
