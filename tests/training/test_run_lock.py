"""One run at a time in a run folder: who has it is told, and it is taken from nobody who may still live."""

import errno
import fcntl
import json
import os
import socket
import time
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest

from jaxdist import train
from jaxdist.cluster import consensus, faults
from jaxdist.cluster.heartbeat import STEPPING, Heartbeat
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.watchdog import Watchdog
from jaxdist.config import Busy, RequestError
from jaxdist.request.commandline import outcome
from jaxdist.training import opening, run_lock
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_lock import LockLost, RunLock
from jaxdist.training.trainer import Trainer

LIMIT = 30

ELSEWHERE = dict(host="n7", pid=4711, job="23", time=0.0, token="theirs")

HERE = ELSEWHERE | dict(host=socket.gethostname())


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(run_lock, "SETTLE", 0.0)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def lock_of(folder: RunFolder) -> RunLock:
    return RunLock(folder.path, folder.heartbeats, LIMIT)


def name(folder: RunFolder, content: object, ago: float = 0.0) -> Path:
    """A lock file with this content, written so many seconds ago."""
    path = folder.path / ".lock"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    os.utime(path, (time.time() - ago,) * 2)
    return path


@contextmanager
def held(path: Path):
    """The file is locked, as by another process: flock looks at open files."""
    with path.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield file


def beat(folder: RunFolder, ago: float, process: int = 0, of: int = 1, **more: object) -> None:
    """A heartbeat of the holder `ELSEWHERE`, written so many seconds ago."""
    facts = dict(host="n7", pid=4711, step=5, doing=STEPPING, since=1.0, step_seconds=1.0, data_seconds=0.0)
    folder.heartbeats.mkdir(exist_ok=True)
    path = folder.heartbeats / f"{process}.json"
    path.write_text(json.dumps(asdict(Heartbeat(process=process, processes=of, **facts | more))))
    os.utime(path, (time.time() - ago,) * 2)


def test_the_file_names_the_holder_as_long_as_it_holds(folder, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    seen = []
    for _ in range(2):
        with folder.locked():
            seen.append(json.loads((folder.path / ".lock").read_text()))
        assert (folder.path / ".lock").read_text() == ""
    assert {key: seen[0][key] for key in ("host", "pid", "job")} == {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job": "42",
    }
    assert abs(seen[0]["time"] - time.time()) < 60
    assert seen[0]["token"] != seen[1]["token"]
    assert len(seen[0]["token"]) == 32
    assert [path.name for path in folder.path.iterdir()] == [".lock"]


@pytest.mark.parametrize(("job", "words"), [("42", "Slurm job 42"), ("", "no Slurm job")])
def test_a_folder_in_use_tells_by_whom(folder, monkeypatch, job, words):
    monkeypatch.setenv("SLURM_JOB_ID", job)
    where = f"process {os.getpid()} on {socket.gethostname()}"
    with folder.locked(), pytest.raises(Busy) as found, folder.locked():
        pass
    assert found.value.exit_code == 75
    assert found.value.problems == [
        f"run folder {folder.path} is in use by {where} ({words}); wait for it, or name another run folder"
    ]
    with folder.locked():
        pass


@pytest.mark.parametrize("kind", ["link", "dangling", "folder", "pipe"])
def test_what_is_no_file_is_refused_and_not_followed(folder, tmp_path, kind):
    lock, outside = folder.path / ".lock", tmp_path / "outside"
    if kind == "link":
        outside.write_text("kept")
    if kind in ("link", "dangling"):
        lock.symlink_to(outside)
    elif kind == "folder":
        lock.mkdir()
    else:
        os.mkfifo(lock)
    with pytest.raises(RequestError, match=r"\.lock is no regular file, so it cannot be locked; remove it") as found:
        folder.locked().__enter__()
    assert found.value.exit_code == 2
    assert outside.exists() == (kind == "link")
    assert kind != "link" or outside.read_text() == "kept"


GARBAGE = [
    "4711",  # as runs wrote it once
    "",
    "\0" * 100,
    "[" * 3000,
    "x" * 100_000,
    json.dumps(ELSEWHERE | dict(pid=-1)),
    json.dumps(ELSEWHERE | dict(pid=10**30)),
    json.dumps(ELSEWHERE | dict(host="")),
    json.dumps(ELSEWHERE | dict(host="n" * 300)),
]


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_a_file_that_names_nobody(folder, content):
    path = name(folder, content, ago=1e6)
    beat(folder, ago=1e6)
    with held(path), pytest.raises(Busy, match="is in use by another process; wait"):
        folder.locked().__enter__()
    with folder.locked() as lock:
        assert lock.lost() is None


def test_nothing_that_it_says_gets_to_a_terminal_as_it_is(folder):
    path = name(folder, ELSEWHERE | dict(host="n7\x1b[2J\nroot", job="\x07"))
    with held(path), pytest.raises(Busy, match=r"by process 4711 on n7\?\[2J\?root \(Slurm job \?\); wait"):
        folder.locked().__enter__()


BROKEN = [
    # holder, seconds since the lock and each heartbeat were written, whether the lock is broken
    (ELSEWHERE, 1e4, [3 * LIMIT + 5], True),
    (ELSEWHERE, 1e4, [3 * LIMIT - 5], False),
    (ELSEWHERE, 1e4, [1e4, 10], False),  # another process of it still writes
    (ELSEWHERE, 10, [1e4], False),  # it has only begun, and the heartbeats are of an earlier run
    (ELSEWHERE, 1e4, [], False),  # it writes none, as `checkpoints --prune`
    (HERE, 1e4, [1e4], False),  # a lock of this host ends with its process
]


@pytest.mark.parametrize(("holder", "written", "beats", "broken"), BROKEN)
def test_a_lock_is_broken_only_when_a_run_on_another_host_is_silent(folder, holder, written, beats, broken):
    path = name(folder, holder, ago=written)
    for process, ago in enumerate(beats):
        beat(folder, ago, process, of=len(beats), host=holder["host"])
    with held(path) as theirs:
        if not broken:
            with pytest.raises(Busy, match=rf"by process 4711 on {holder['host']} \(Slurm job 23\)"):
                folder.locked(LIMIT).__enter__()
            assert os.path.samestat(os.fstat(theirs.fileno()), path.stat())
            assert json.loads(path.read_text()) == holder
            return
        with folder.locked(LIMIT) as lock:
            told = f"the lock of {folder.path} was still held by process 4711 on n7, which is silent, and is broken"
            assert lock.notes == [told]
            assert not os.path.samestat(os.fstat(theirs.fileno()), path.stat())
            assert json.loads(path.read_text())["pid"] == os.getpid()
            assert lock.lost() is None
            assert json.loads(os.pread(theirs.fileno(), 4096, 0)) == holder  # theirs stays as it was
            with pytest.raises(Busy, match=f"by process {os.getpid()}"):
                folder.locked(LIMIT).__enter__()
    assert sorted(one.name for one in folder.path.iterdir()) == [".lock"] + ["heartbeats"] * bool(beats)


def test_heartbeats_of_many_processes_are_further_apart(folder):
    """One of 4096 processes writes every 128 s: nobody is silent after 90 s."""
    path = name(folder, ELSEWHERE, ago=1e4)
    with held(path):
        beat(folder, ago=300, of=4096)
        with pytest.raises(Busy):
            folder.locked(LIMIT).__enter__()
        beat(folder, ago=400, of=4096)
        with folder.locked(LIMIT):
            pass


def test_the_clock_of_this_host_does_not_matter(folder, monkeypatch):
    path = name(folder, ELSEWHERE, ago=1e4)
    beat(folder, ago=20)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    with held(path), pytest.raises(Busy):
        folder.locked(LIMIT).__enter__()


def test_a_heartbeat_that_is_none_does_no_harm(folder):
    path = name(folder, ELSEWHERE, ago=1e4)
    beat(folder, ago=1e4)
    os.mkfifo(folder.heartbeats / "1.json")
    (folder.heartbeats / "2.json").symlink_to("/dev/zero")
    (folder.heartbeats / "3.json").mkdir()
    (folder.heartbeats / "4.json").write_text("[" * 5000)
    (folder.heartbeats / "5.json").write_text(json.dumps({"process": "x", "time": "now"}))
    (folder.heartbeats / "².json").write_text("{}")
    with held(path), folder.locked(LIMIT):
        pass


def test_whoever_lost_its_lock_hears_of_it(folder):
    first = lock_of(folder).__enter__()
    assert first.lost() is None
    beat(folder, ago=1e4, host="n7")
    name(folder, ELSEWHERE, ago=1e4)  # the same process, seen from another host
    first._me = first._me.model_copy(update=dict(token="theirs"))
    assert first.lost() is None
    with lock_of(folder) as second:
        told = f"run folder {folder.path} was taken by process {os.getpid()} on {socket.gethostname()} while this"
        assert first.lost().startswith(told)
        first.__exit__()
        assert second.lost() is None  # and whoever lost it leaves it as it is
        assert second._me.token in (folder.path / ".lock").read_text()


@pytest.mark.parametrize("change", ["removed", "replaced", "written", "link", "pipe"])
def test_a_lock_file_that_is_not_as_it_was_is_lost(folder, tmp_path, change):
    path = folder.path / ".lock"
    with folder.locked() as lock:
        content = path.read_text()
        if change == "written":
            path.write_text(json.dumps(ELSEWHERE))
        else:
            path.unlink()
        if change == "replaced":
            path.write_text(content)
        if change == "link":
            (tmp_path / "copy").write_text(content)
            path.symlink_to(tmp_path / "copy")
        if change == "pipe":
            os.mkfifo(path)
        assert "nothing more is saved" in lock.lost()
        assert "None" not in lock.lost()


def test_of_two_that_break_a_lock_at_once_one_has_it(folder, monkeypatch):
    path = name(folder, ELSEWHERE, ago=1e4)
    beat(folder, ago=1e4)

    def other_replaces_it(_: float) -> None:
        path.unlink()
        name(folder, ELSEWHERE | dict(token="another"))

    monkeypatch.setattr(run_lock.time, "sleep", other_replaces_it)
    with held(path), pytest.raises(Busy, match="is in use by another process"):
        folder.locked(LIMIT).__enter__()
    assert json.loads(path.read_text())["token"] == "another"


def test_a_file_that_is_replaced_before_it_is_locked_is_looked_at_again(folder, monkeypatch):
    real, path, times = fcntl.flock, folder.path / ".lock", []

    def slow(file, how: int) -> None:
        times.append(how)
        if len(times) == 1:
            path.unlink()
            path.touch()
        real(file, how)

    monkeypatch.setattr(run_lock.fcntl, "flock", slow)
    with folder.locked() as lock:
        assert lock.lost() is None
    assert len(times) == 2


NO_LOCKS = [
    # holder, seconds since the lock file was written, heartbeat: (ago, exit code), whether it is in use
    (None, 0, None, False),
    (ELSEWHERE, 1e4, (10, None), True),
    (HERE, 1e4, (10, None), True),
    (ELSEWHERE, 1e4, (10, 1), False),  # it has said that it has ended
    (ELSEWHERE, 1e4, (3 * LIMIT + 5, None), False),
    (HERE, 1e4, (3 * LIMIT + 5, None), False),
    (ELSEWHERE, 10, None, True),  # it has only begun
    (ELSEWHERE, 1e4, None, False),
]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize(("holder", "written", "heartbeat", "used"), NO_LOCKS)
def test_without_locks_the_heartbeats_tell(folder, monkeypatch, holder, written, heartbeat, used, number):
    def none(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run_lock.fcntl, "flock", none)
    if holder:
        name(folder, holder, ago=written)
    if heartbeat:
        beat(folder, heartbeat[0], ended=heartbeat[1], host=holder["host"])
    if used:
        with pytest.raises(Busy, match="is in use by process 4711"):
            folder.locked(LIMIT).__enter__()
        return
    with folder.locked(LIMIT) as lock:
        assert lock.notes == [
            f"{folder.path} is on a file system without locks ({os.strerror(number)}): heartbeats alone show whether "
            f"another run is in it"
        ]
        assert lock.lost() is None
        with pytest.raises(Busy, match=f"is in use by process {os.getpid()}"):
            folder.locked(LIMIT).__enter__()
    with folder.locked(LIMIT):  # it said that it left
        pass


def test_a_disk_that_is_full_has_no_room_for_the_name(folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(run_lock.os, "write", full)
    with folder.locked() as lock:
        assert lock.lost() is None
        with pytest.raises(Busy, match="by another process"):
            folder.locked().__enter__()


def test_a_heart_goes_on_beating_beside_strange_names(folder):
    folder.heartbeats.mkdir()
    for strange in ("²", "9" * 200, "x"):
        (folder.heartbeats / f"{strange}.json").touch()
    with Watchdog(ProcessEnv(), 0) as dog:
        dog.beat_in(folder.heartbeats)
        deadline = time.monotonic() + 10
        while not (folder.heartbeats / "0.json").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert dog._heartbeat._thread.is_alive()


def raising(argv: list[str]) -> int:
    raise Busy("in use")


def test_a_folder_in_use_is_exit_code_75(monkeypatch, capsys):
    assert outcome(raising, []) == 75
    assert capsys.readouterr().err.endswith(": in use\n")
    codes = []
    monkeypatch.setattr(faults, "end_all", lambda place, code, lines: codes.append((code, lines)))
    faults.fail(ProcessEnv(2, 0), Busy("in use"))
    faults.fail(ProcessEnv(2, 0), RequestError("wrong"))
    assert codes == [(75, ["in use"]), (2, ["wrong"])]


@pytest.mark.parametrize("kind", [Busy, RequestError])
def test_all_processes_raise_what_the_first_one_does(monkeypatch, kind):
    posted = {}

    def refuse() -> int:
        raise kind("no")

    monkeypatch.setattr(consensus, "LEADER_SPEAKS", 0.0)
    monkeypatch.setattr(consensus.jax, "process_count", lambda: 2)
    monkeypatch.setattr(consensus.kv_store, "post", lambda name, text: posted.setdefault("it", text))
    monkeypatch.setattr(consensus.kv_store, "read", lambda name: posted["it"])
    raised = []
    for number in 0, 1:
        monkeypatch.setattr(consensus.jax, "process_index", lambda number=number: number)
        with pytest.raises(RequestError) as found:
            consensus.agreed(refuse)
        raised.append(type(found.value))
    assert raised == [kind, kind]


def test_all_processes_hear_that_the_lock_is_lost(folder, monkeypatch):
    with opening.locked(folder, LIMIT, print) as check:
        check()
        (folder.path / ".lock").unlink()
        with pytest.raises(LockLost, match="cannot be read any more"):
            check()
        monkeypatch.setattr(opening, "leader", lambda: False)
        monkeypatch.setattr(opening, "from_leader", lambda value: 1)  # as the leader has found it
        with pytest.raises(LockLost):
            check()


def test_a_note_about_missing_locks_is_said_once(folder, monkeypatch, capsys):
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", none)
    with opening.locked(folder, LIMIT, print):
        pass
    assert capsys.readouterr().out.count("is on a file system without locks (No locks available)") == 1


@pytest.mark.slow
def test_a_run_whose_folder_was_taken_ends_with_1_and_saves_nothing(request_of, tmp_path, monkeypatch, capsys):
    step = Trainer.step

    def step_and_lose(self, number, *more):
        if number == 7:
            (tmp_path / "taken" / ".lock").unlink()
            name(self.folder, ELSEWHERE)
        return step(self, number, *more)

    monkeypatch.setattr(Trainer, "step", step_and_lose)
    assert train.main(request_of("taken")) == 1
    told = capsys.readouterr().err
    assert "stopped: run folder" in told
    assert "was taken by process 4711 on n7 while this run was silent; nothing more is saved" in told
    assert sorted(path.name for path in (tmp_path / "taken" / "checkpoints").iterdir()) == ["5", "sums"]
    assert json.loads((tmp_path / "taken" / ".lock").read_text()) == ELSEWHERE
