"""Programs of Python as forks of a process that has imported what they need: most of the time of short ones is imports.

A fork begins before JAX has any device, as a process that is started does, and imports jaxdist itself, unless that is
among the modules that were asked for. Like one that is started it has its own environment, folder, streams and signals.
It differs in its parent, which is neither this process nor one that takes part in its life.
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parent.parent

LIBRARIES = ("numpy", "jax", "flax.nnx", "optax", "orbax.checkpoint", "pydantic", "tokenizers")

LARGEST = 1 << 17
"""Bytes of a message: the words of a command and its environment."""

MOST = 4
"""Processes that fork, of 250 MB each."""

READ_ONCE = ("JAX_", "PYTHON", "LC_", "LANG")
"""How variables begin that Python and JAX read when they start or are imported."""

OF_A_JOB = {"JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"}
"""Of these, variables that are read when a process joins others."""


class Fork:
    """A program that runs, with what tests ask of `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], status: socket.socket):
        self.args = args
        self.returncode: int | None = None
        self._status = status
        self.pid = int(status.recv(LARGEST))

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _ended(self, seconds: float | None) -> int | None:
        """The exit code, after at most `seconds`."""
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            self.returncode = int(self._status.recv(LARGEST))
            self._status.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Template:
    """A process that has imported `modules`, and forks for each program that is asked of it."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str]):
        self._asking, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "tests.forks", str(theirs.fileno()), *modules]
        nothing = dict(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with theirs:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()], **nothing)

    def start(self, words: Sequence[str], environment: Mapping[str, str], folder: str, streams: Sequence[int]) -> Fork:
        """Run what follows the interpreter's name in a command: `-m MODULE`, `-c TEXT` or a file, and arguments."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        message = json.dumps([words, dict(environment), folder]).encode()
        with theirs:
            socket.send_fds(self._asking, [message], [*streams, theirs.fileno()])
        return Fork([sys.executable, *words], ours)

    def close(self) -> None:
        self._asking.close()
        self._process.wait()


_templates: dict[object, Template] = {}


def start(
    words: Sequence[str],
    *,
    streams: Sequence[int],
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    modules: Sequence[str] = LIBRARIES,
) -> Fork:
    """Run what follows the name of the interpreter in a command, with these `streams`, the numbers of three files.

    `modules` are imported once for all programs whose environments are alike where it matters for imports.
    """
    env = os.environ if env is None else env
    read_once = frozenset(one for one in env.items() if one[0].startswith(READ_ONCE) and one[0] not in OF_A_JOB)
    key = (read_once, *modules)
    if key not in _templates:
        if len(_templates) == MOST:
            _templates.pop(next(iter(_templates))).close()
        _templates[key] = Template(env, modules)
    return _templates[key].start([*map(str, words)], env, os.path.abspath(cwd or os.getcwd()), streams)


def run(command: Sequence[object], *, timeout: float | None = None, **options) -> subprocess.CompletedProcess:
    """`subprocess.run(command, capture_output=True, text=True)` of a program of Python; `options` are `env`, `cwd`."""
    interpreter, *words = command
    assert interpreter == sys.executable
    with contextlib.ExitStack() as files:
        out, err = (files.enter_context(open_unnamed()) for _ in range(2))
        nothing = files.enter_context(open(os.devnull))
        streams = [file.fileno() for file in (nothing, out, err)]
        program = start(words, streams=streams, **options)
        try:
            program.wait(timeout)
        finally:
            program.kill()
        return subprocess.CompletedProcess(program.args, program.returncode, *map(text_of, (out, err)))


def open_unnamed():
    return open(os.memfd_create("said"), "w+b")


def text_of(file) -> str:
    file.seek(0)
    return file.read().decode()


def close() -> None:
    """End the processes that fork."""
    for template in _templates.values():
        template.close()
    _templates.clear()


def serve(asking: socket.socket, modules: Sequence[str]) -> None:
    """Import `modules`, then fork for each message, until nobody can send one."""
    for name in modules:
        import_module(name)
    gc.freeze()
    # No thread is running yet: JAX starts them with its devices.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how who waits for a program has ended
    while True:
        message, (*streams, status), *_ = socket.recv_fds(asking, LARGEST, 4)
        if not message:
            os._exit(0)
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if pid := os.fork():
                tell(socket.socket(fileno=status), pid)
            break
        for number in (*streams, status):
            os.close(number)
    asking.close()
    os.close(status)
    words, environment, folder = json.loads(message)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    end(code_of(words))


def code_of(words: Sequence[str]) -> int:
    """Run the program. Returns its exit code."""
    try:
        try:
            run_program(words)
            return 0
        except Exception as error:
            sys.excepthook(type(error), error, error.__traceback__)
        except KeyboardInterrupt as error:
            sys.excepthook(type(error), error, error.__traceback__)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    except SystemExit as ended:
        if isinstance(ended.code, int) or ended.code is None:
            return ended.code or 0
        print(ended.code, file=sys.stderr)
    return 1


def end(code: int) -> None:
    """Do what a program has asked for at its end, and leave the modules as they are: to take them down takes longer."""
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def tell(status: socket.socket, pid: int) -> None:
    """Send the number of the process, and how it has ended, as `Popen.returncode` says it. Does not return."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(BrokenPipeError):
        status.send(str(pid).encode())
        _, how = os.waitpid(pid, 0)
        status.send(str(os.waitstatus_to_exitcode(how)).encode())
    os._exit(0)


def run_program(words: Sequence[str]) -> None:
    """Do what the interpreter does for these words of its command."""
    first, *rest = words
    sys.orig_argv = [sys.executable, *words]
    sys.argv = words if first not in ("-c", "-m") else [first, *rest[1:]]
    sys.path[0] = {"-c": "", "-m": os.getcwd()}.get(first, os.path.dirname(os.path.abspath(first)))
    if first == "-u":
        sys.stdout.reconfigure(write_through=True)
        run_program(rest)
    elif first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
