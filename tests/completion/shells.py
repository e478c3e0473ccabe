"""Real shells that read a completion script, and what a TAB offers in them."""

import contextlib
import os
import pty
import re
import shlex
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

PATIENCE = 60
"""Seconds for a shell to answer, which takes milliseconds."""


def needed(shell: str) -> str:
    """The path of a shell; skips the test where it is not installed."""
    path = shutil.which(shell)
    if not path:
        pytest.skip(f"{shell} is not installed: apt-get install {shell}")
    return path


def offered(shell: str, script: Path, lines: Sequence[str], folder: Path) -> list[list[str]]:
    """What a TAB behind each line offers in `folder`: names without descriptions, paths as they are."""
    return {"bash": in_bash, "zsh": in_zsh, "fish": in_fish}[shell](script, lines, folder)


def in_bash(script: Path, lines: Sequence[str], folder: Path, before: str = "") -> list[list[str]]:
    """As bash calls a completion: with the words of the line, which it splits at "=" and ":" too."""
    program = [before, f"source {shlex.quote(str(script))}"]
    for line in lines:
        words = re.findall(r"[=:]|[^\s=:]+", line) + ([""] if line.endswith(" ") else [])
        program += [
            f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1} COMPREPLY=()",
            f"specification=$(complete -p {words[0]})",
            '[[ $specification =~ -F\\ ([^ ]+) ]] && ${BASH_REMATCH[1]} x "${COMP_WORDS[COMP_CWORD]}" y 2>/dev/null',
            'printf "%s\\n" "${COMPREPLY[@]}" "--- end"',
        ]
    said = run([needed("bash"), "--norc", "-c", "\n".join(program)], folder)
    return [part.split("\n") for part in said.split("--- end\n")[:-1]]


def in_fish(script: Path, lines: Sequence[str], folder: Path) -> list[list[str]]:
    program = [f"source {shlex.quote(str(script))}"]
    for line in lines:
        program += [f'complete -C {shlex.quote(line)}; echo "--- end"']
    said = run([needed("fish"), "--no-config", "-c", "\n".join(program)], folder)
    found = [[row.partition("\t")[0] for row in part.split("\n")] for part in said.split("--- end\n")[:-1]]
    # The other shells complete only what follows the "=".
    return [
        [re.sub(r"^--[\w.-]+=", "", name) for name in names] if re.search(r"--\S+=\S*$", line) else names
        for line, names in zip(lines, found, strict=True)
    ]


def run(command: Sequence[str], folder: Path) -> str:
    environment = dict(os.environ, HOME=str(folder), PATH=f"{folder}/bin:{os.environ['PATH']}", LC_ALL="C.UTF-8")
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


RECORDING = r"""
unsetopt beep auto_list auto_menu
autoload -Uz compinit && compinit -u -D
bindkey '^I' complete-word
compadd() {
    # Called to filter, not to offer.
    if [[ ${@[1,(i)(-|--)]} == *-(O|A|D)\ * ]]; then
        builtin compadd "$@"
        return
    fi
    local -a __hits
    builtin compadd -A __hits "$@"
    print -rl -- $__hits >> offered
    builtin compadd "$@"
}
finish() { print -r -- '--- end' >> offered; comppostfuncs=(finish) }
comppostfuncs=(finish)
"""
"""zsh for a test: what a completion offers goes into the file `offered` too."""


def in_zsh(script: Path, lines: Sequence[str], folder: Path) -> list[list[str]]:
    """As a user at a terminal: each line is typed, then TAB."""
    file = folder / "offered"
    file.unlink(missing_ok=True)
    with typing([needed("zsh"), "-f", "-i"], folder) as typed:
        recording = folder / "recording.zsh"
        recording.write_text(RECORDING)
        typed(f"source {recording} && source {shlex.quote(str(script))} && print -r -- '--- end' >> offered\n")
        wait(file, 1)
        for number, line in enumerate(lines, start=2):
            typed(f"{line}\t")
            wait(file, number)
            typed("\x15")  # Ctrl-U: the line is removed
    return [part.split("\n") for part in file.read_text().split("--- end\n")[1:-1]]


def wait(file: Path, ends: int) -> None:
    until = time.monotonic() + PATIENCE
    while not file.exists() or file.read_text().count("--- end\n") < ends:
        assert time.monotonic() < until, file.read_text() if file.exists() else "nothing was offered"
        time.sleep(0.01)


@contextlib.contextmanager
def typing(command: Sequence[str], folder: Path) -> Iterator:
    """A shell at a terminal of its own; what is typed into it is given to the function that this yields."""
    ours, theirs = pty.openpty()
    environment = dict(os.environ, HOME=str(folder), PATH=f"{folder}/bin:{os.environ['PATH']}", TERM="dumb")
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)

    def read() -> None:
        with contextlib.suppress(OSError):  # the terminal is closed
            while os.read(ours, 65536):
                pass

    # Unread output would stop the shell.
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield lambda text: os.write(ours, text.encode())
    finally:
        process.kill()
        process.wait()
        reader.join(PATIENCE)
        os.close(ours)
