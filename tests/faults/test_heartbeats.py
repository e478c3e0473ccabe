"""Heartbeats: who is slow, behind or silent is named, also by the watchdog; a run that has ended says so."""

import json
import os
import random
import re
import signal
import statistics
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxdist.cluster import faults, heartbeat, kv_store, watchdog
from jaxdist.cluster.heartbeat import (
    COMPILING,
    STEPPING,
    WAITING,
    Heartbeat,
    HeartbeatWriter,
    Spent,
    stragglers,
    waited_for,
)
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.cluster.watchdog import Watchdog
from jaxdist.doctor import watching
from jaxdist.doctor.__main__ import main as doctor
from jaxdist.output.units import duration
from tests.faults.jobs import ends, job, told, train, until
from tests.group import Group

NOW = 1_000_000.0

FAST = """
from jaxdist.cluster import heartbeat
heartbeat.LEAST_INTERVAL = 0.5
batch = Task.batch_after
def slow_reader(self, step):
    time.sleep(0.2 * (me == 1))
    return batch(self, step)
Task.batch_after = slow_reader
"""


def beat(
    process: int, step: int = 50, doing: str = STEPPING, since: float = 0.0, ago: float = 1.0, **more
) -> Heartbeat:
    facts = dict(processes=3, step_seconds=0.5, data_seconds=0.01) | more
    return Heartbeat(process, host=f"n{process}", pid=1, step=step, doing=doing, since=since, time=NOW - ago, **facts)


def three(**of_the_second) -> list[Heartbeat]:
    return [beat(0), beat(1, **of_the_second), beat(2, ago=3.0, step=46)]


STANDING = [beat(0, since=60), beat(1, since=60), beat(2, since=60, ago=3.0)]

STUCK = [
    (dict(step=49, doing=WAITING), "waiting for data, step 49, for 60 s"),
    (dict(step=49), "stepping, step 49"),
    (dict(step=0, doing=COMPILING), "compiling, step 0"),
    (dict(ago=40.0), "silent for 40 s; last: stepping, step 50"),
    (dict(ended=1), "failed with exit code 1, step 50"),
]


@pytest.mark.parametrize(("facts", "sentence"), STUCK)
def test_whom_the_others_wait_for(facts, sentence):
    assert waited_for(STANDING, NOW) == {}  # all are in the same place
    found = waited_for([STANDING[0], beat(1, **(dict(since=60) | facts)), STANDING[2]], NOW)
    assert list(found) == [1]
    assert sentence in found[1]


def test_nobody_is_waited_for_while_all_go_on():
    assert waited_for(three(), NOW) == waited_for(three(step=49, doing=WAITING), NOW) == {}
    assert waited_for([replace(one, ended=85) for one in STANDING], NOW) == {}


def test_of_all_that_are_silent_the_first_is_named():
    """They were killed, or ended by JAX, when one had been lost."""
    gone = [replace(one, time=one.time - 600) for one in STANDING]
    assert waited_for(gone, NOW) == {}
    gone[2] = replace(gone[2], time=gone[2].time - 30)
    assert waited_for(gone, NOW) == {2: "silent 32 s before the others; last: stepping, step 50, for 60 s"}


@pytest.mark.parametrize(("processes", "seconds"), [(1, 20), (160, 20), (320, 40), (4096, 512)])
def test_of_many_processes_each_may_be_silent_for_longer(processes, seconds):
    """Each writes one in 5 seconds, or all together 32 in a second, whichever is less; four may be missing."""
    assert not beat(0, processes=processes, ago=seconds - 1).silent(NOW)
    assert beat(0, processes=processes, ago=seconds + 1).silent(NOW)
    assert not beat(0, processes=processes, ago=seconds + 1, ended=0).silent(NOW)


SLOWER = [
    (dict(step_seconds=0.8), "a step takes 0.8 s, those of the others 0.5 s"),
    (dict(data_seconds=0.3), "waits 0.3 s of each step for data, the others 10 ms"),
    (dict(step=40), "at step 40, process 0 on n0 at step 50, reported 0 s apart"),
]


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0.0, "0 s"),
        (6.63e-05, "66.3 us"),
        (0.00663, "6.63 ms"),
        (0.25, "0.25 s"),
        (12.345, "12.3 s"),
        (4567, "4,567 s"),
    ],
)
def test_a_time_has_a_unit_that_fits(seconds, told):
    assert duration(seconds) == told


def test_heartbeats_of_different_age_are_no_lag():
    """Two processes at the same pace, one heard of 4 s later: their steps differ, what they are at by now does not."""
    late, early = beat(0, step=50, ago=0.0), beat(1, step=42, ago=4.0)
    assert late.step_at(NOW) == early.step_at(NOW) == 50
    assert stragglers([late, early], NOW) == {}
    assert [beat(0, ended=0).step_at(NOW), beat(0, ago=40.0).step_at(NOW)] == [None, None]
    assert beat(0, step_seconds=None).step_at(NOW) is None


def test_the_table_says_how_old_a_step_is(tmp_path, monkeypatch):
    beats = [beat(0, step=50, ago=0.0), beat(1, step=42, ago=4.0, data_seconds=6.63e-05), beat(2, ended=0)]
    monkeypatch.setattr(watching.heartbeat, "read", lambda folder, only=None: beats)
    monkeypatch.setattr(watching.time, "time", lambda: NOW)
    head, first, second, third, last = watching.lines(watching.watch(tmp_path))
    assert re.split(" {2,}", head)[3:6] == ["step", "heard", "now about"]
    assert re.split(" {2,}", first)[3:6] == ["50", "0 s ago", "step 50"]
    assert re.split(" {2,}", second)[3:6] == ["42", "4 s ago", "step 50"]
    assert re.split(" {2,}", third)[3:6] == ["50", "1 s ago", "-"]
    assert "66.3 us" in second
    assert last == "nothing is wrong with it"


@pytest.mark.parametrize(("facts", "sentence"), SLOWER)
def test_who_is_slow_or_behind(facts, sentence):
    assert stragglers(three(), NOW) == {}
    assert stragglers(three(**facts), NOW) == {1: sentence}
    assert stragglers(three(**facts, ended=0), NOW) == {}


def test_medians_of_the_others_are_those_of_each_alone():
    """They come from one sorted list of all, also where several are equal."""
    rng = random.Random(0)
    for count in range(2, 9):
        numbers = sorted(rng.choice((0.0, 1.0, 2.5, 4.0)) for _ in range(count))
        for own in numbers:
            others = list(numbers)
            others.remove(own)
            assert heartbeat._median_of_others(numbers, own) == statistics.median(others)


MANY = 64


class Opened:
    """Heartbeats of `MANY` processes, of which number 7 does not move; counts the files of theirs that are opened."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.files = folder, []
        before = heartbeat.open_no_follow
        for number in range(MANY):
            step = 49 if number == 7 else 50
            one = beat(number, step, since=60.0, processes=MANY)
            (folder / f"{number}.json").write_text(json.dumps(asdict(one)))

        def opened(path, mode):
            if path.suffix == ".json":
                self.files.append(path.name)
            return before(path, mode)

        monkeypatch.setattr(heartbeat, "open_no_follow", opened)

    def dog(self, number: int) -> Watchdog:
        dog = Watchdog(ProcessEnv(MANY, number, "here:1"), 0)
        dog._heartbeat = SimpleNamespace(folder=self.folder)
        return dog


def test_at_a_hang_one_process_reads_the_heartbeats_and_all_know_who_is_waited_for(tmp_path, monkeypatch):
    group, opened = Group(monkeypatch, MANY), Opened(tmp_path, monkeypatch)
    group.may_fail = True
    found = group.run(lambda: opened.dog(kv_store.process())._ask_for_stragglers())
    assert len(opened.files) == MANY
    sentence = "the others wait for process 7 on n7: stepping, step 49, for 60 s"
    assert found == [[sentence]] * MANY
    # Once, for the launcher: the host first, and the reason last.
    (named,) = (tmp_path / heartbeat.NAMED).read_text().splitlines()
    assert re.fullmatch(rf"n7 \S+Z {sentence}", named)
    assert max(group.posts.values()) <= 2
    assert max(group.reads.values()) <= 1


def test_where_process_0_does_not_answer_process_1_alone_reads_them(tmp_path, monkeypatch):
    opened = Opened(tmp_path, monkeypatch)

    def gone(name, seconds):
        raise TimeoutError(name)

    monkeypatch.setattr(kv_store, "post", lambda name, text: False)
    monkeypatch.setattr(kv_store, "read", gone)
    found = [opened.dog(number)._ask_for_stragglers() for number in range(MANY)]
    assert len(opened.files) == MANY
    assert [number for number, sentences in enumerate(found) if sentences] == [1]


def test_a_host_that_is_named_is_one_word_of_one_line(tmp_path):
    """Its name comes from another host, and a shell reads it."""
    name = partial(heartbeat.name_host, tmp_path)
    assert name("n 3\nn4", "is\nlost\x1b[2J")
    name("x" * 9000, "y")
    first, second = (tmp_path / heartbeat.NAMED).read_text().splitlines()
    assert re.fullmatch(r"n3n4 \S+Z is lost\\u001b\[2J", first)
    assert len(second) <= heartbeat.LONGEST
    (tmp_path / heartbeat.NAMED).unlink()
    (tmp_path / heartbeat.NAMED).symlink_to(tmp_path / "elsewhere")
    assert not name("n3", "is lost")
    assert not (tmp_path / "elsewhere").exists()


def test_process_0_looks_for_all_and_process_1_for_process_0(tmp_path, monkeypatch):
    """No more often than heartbeats come, and by the clock of the file system, which here is decades behind."""
    opened = Opened(tmp_path, monkeypatch)
    for number in range(MANY):
        os.utime(tmp_path / f"{number}.json", (0, 50 if number != 7 else 38))
    first, second = opened.dog(0), opened.dog(1)
    first._look_for_lost()
    os.utime(tmp_path / "1.json", (0, 62))
    second._look_for_lost()
    assert opened.files[MANY:] == ["0.json", "1.json"]
    assert [first._reported, second._reported] == [{7}, {0}]
    named = [line.split()[0] for line in (tmp_path / heartbeat.NAMED).read_text().splitlines()]
    assert named == ["n7", "n0"]
    assert heartbeat.every(1024) == 32.0


def watched(folder: Path, *beats: Heartbeat) -> list[str]:
    """The hosts that are named in a run folder after the doctor has looked at these heartbeats, as by `NOW`."""
    (folder / "heartbeats").mkdir(exist_ok=True)
    (folder / "config.toml").touch()
    for one in beats:
        file = folder / "heartbeats" / f"{one.process}.json"
        file.write_text(json.dumps(asdict(one)))
        os.utime(file, (one.time, one.time))
    doctor([str(folder)])
    named = folder / "heartbeats" / heartbeat.NAMED
    return [line.split()[0] for line in named.read_text().splitlines()] if named.exists() else []


LOST = beat(1, ago=60.0)


@pytest.mark.parametrize(
    ("beats", "ahead", "hosts"),
    [
        (three(), 0, []),
        ([beat(0), LOST, beat(2)], 0, ["n1"]),  # silent
        ([beat(0, since=60), beat(1, since=60, step=49), beat(2, since=60)], 0, ["n1"]),  # behind
        ([beat(0), beat(1, step_seconds=2.0), beat(2)], 0, ["n1"]),  # slow
        # Nobody's fault alone, or nobody's at all:
        ([beat(0), LOST, beat(2, ago=60.0)], 0, []),
        ([beat(0), LOST, beat(2, step_seconds=2.0)], 0, []),
        ([replace(one, host="n0") for one in (beat(0), LOST, beat(2))], 0, []),
        ([beat(0, ended=85), replace(LOST, ended=1), beat(2, ended=85)], 0, []),
        ([beat(0, since=60), beat(1, ended=1), beat(2, since=60)], 0, []),  # which the others wait for
        ([beat(0, ago=60.0), LOST, beat(2, ago=58.0)], 0, []),
        # The clock of the reader is ahead: some seem silent, or the one that is behind by its heartbeat waited for.
        ([beat(0), beat(1, ago=5.0), beat(2)], 16, []),
        ([beat(0), beat(1, ago=5.0, step=41), beat(2)], 14, []),
    ],
)
def test_the_doctor_names_the_only_host_that_is_bad(beats, ahead, hosts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watching.time, "time", lambda: NOW + ahead)
    assert watched(tmp_path, *beats) == hosts
    assert ("n1 is named in " in capsys.readouterr().out) == bool(hosts)


def test_the_doctor_names_a_host_once_in_each_start_of_a_run(tmp_path, monkeypatch, capsys):
    today = time.time()
    monkeypatch.setattr(watching.time, "time", lambda: NOW)
    beats = [beat(0, spent=Spent(today - 100)), LOST, beat(2)]
    assert watched(tmp_path, *beats) == ["n1"]
    file = tmp_path / "heartbeats" / heartbeat.NAMED
    reason = "jaxdist.doctor: the others wait for process 1 on n1: silent for 60 s; last: stepping, step 50, for 0 s"
    assert re.fullmatch(rf"n1 \S+Z {reason}\n", file.read_text())
    assert watched(tmp_path, *beats) == ["n1"]
    assert watched(tmp_path, beat(0, spent=Spent(today + 100)), *beats[1:]) == ["n1", "n1"]
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    watched(tmp_path, *beats)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.slow
def test_a_slow_process_and_a_stopped_one_are_named(words, tmp_path, monkeypatch, capsys):
    """What is left of a process that the run no longer has is cleared away; a run that was stopped is well."""
    monkeypatch.setattr(heartbeat, "LEAST_INTERVAL", 0.5)
    folder, options = tmp_path / "run", ("--mesh=2x1x1", "--train.steps=100000", "--data.prefetch=1")
    (folder / "heartbeats").mkdir(parents=True)
    (folder / "heartbeats" / "7.json").write_text("{}")

    def seen() -> str:
        code = doctor([str(folder)])
        return f"{code}\n{capsys.readouterr().out}" if code else ""

    beats = lambda: {one.process: one for one in heartbeat.read(folder / "heartbeats")}
    with job(train(words(*options), 2, FAST)) as running:
        until(lambda: len(beats()) == 2 and all(one.step > 8 for one in beats().values()), running)
        until(lambda: "process 1 on " in seen(), running, 120)
        assert "is slow or behind: waits 0." in seen()
        running[1].send_signal(signal.SIGSTOP)
        until(lambda: ": silent for " in seen(), running, 8)
        assert "the others wait for process 1 on" in seen()
        running[1].send_signal(signal.SIGCONT)
        running[0].send_signal(signal.SIGTERM)
        assert ends(running, 120) == [85, 85], told(running)
    assert sorted(path.name for path in (folder / "heartbeats").glob("*.json")) == ["0.json", "1.json"]
    assert {one.what.partition(",")[0] for one in beats().values()} == {"stopped"}
    assert beats()[1].pid == running[1].pid
    assert seen() == ""


def test_a_run_that_has_failed_says_so(tmp_path, capsys):
    (tmp_path / "config.toml").touch()

    def broken() -> None:
        with Watchdog(ProcessEnv(), 0) as dog:
            dog.beat_in(tmp_path / "heartbeats")
            dog.note(STEPPING, 7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert doctor([str(tmp_path)]) == 2
    assert f"process 0 on {os.uname().nodename} failed with exit code 1, step 7" in capsys.readouterr().out


def test_a_folder_that_takes_no_heartbeat_harms_nobody(tmp_path):
    (tmp_path / "file").touch()
    with Watchdog(ProcessEnv(), 0) as dog:
        dog.beat_in(tmp_path / "file" / "heartbeats")
        thread = dog._heartbeat._thread
        thread.join(0.3)
        assert thread.is_alive()
    assert not thread.is_alive()


def test_a_file_system_that_hangs_holds_nobody_up(tmp_path, monkeypatch):
    monkeypatch.setattr(HeartbeatWriter, "_write", lambda self: time.sleep(30))
    heart, began = HeartbeatWriter(tmp_path, lambda: beat(0)), time.monotonic()
    heart.stop(0)
    assert time.monotonic() - began < 8  # 4 times the 2 s that it waits


def test_a_slow_file_system_loses_no_report(tmp_path, monkeypatch, capfd):
    """The look takes longer than the watchdog waits for a straggler; the process is reported once, and it ticks on."""
    looks = []

    def slow(folder, only):
        looks.append(folder)
        time.sleep(1.5)
        return [beat(0, ago=0.0), beat(1, ago=105.0)]

    monkeypatch.setattr(watchdog, "time", SimpleNamespace(time=lambda: NOW, monotonic=time.monotonic))
    monkeypatch.setattr(heartbeat, "LEAST_INTERVAL", 0.1)
    monkeypatch.setattr(faults, "NOTICE_SECONDS", 0.1)
    monkeypatch.setattr(heartbeat, "read", slow)
    dog = Watchdog(ProcessEnv(processes=2), 0.4)  # looks at the clock ten times a second
    dog.goes_on = lambda: "it starts again"
    dog._heartbeat = SimpleNamespace(folder=tmp_path, stop=lambda code: None)
    monkeypatch.setattr(dog, "_end_job", lambda: None)
    with dog:
        time.sleep(4)
    dog._reporter.join()  # before the clock is put back
    assert capfd.readouterr().err.count("process 1 on n1 is lost or cut off at step 0: no heartbeat for 105 s") == 1
    assert len(looks) >= 2


def test_without_heartbeats_it_says_so(tmp_path):
    from jaxdist.config import RequestError

    (tmp_path / "config.toml").touch()
    with pytest.raises(RequestError, match="has no heartbeats"):
        doctor([str(tmp_path)])


class Ticks:
    """The clock of a watchdog, and the event that it waits for between two looks: each wait takes so many seconds."""

    def __init__(self, waits: list[float]):
        self.now, self.waits = 0.0, list(waits)

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        if not self.waits:
            return True
        self.now += self.waits.pop(0)
        return False


@pytest.mark.parametrize(
    ("waits", "barks"),
    [
        ([1.0] * 7, 0),
        ([1.0] * 9, 1),
        ([1.0, 1000.0, 1.0, 1.0, 1.0], 0),
        ([1000.0, 1.0, 500.0] + [1.0] * 6, 0),
        ([1.0] * 4 + [1000.0] + [1.0] * 5, 1),  # what was before the pause counts on
        ([4.0, 4.0, 4.0], 1),  # a busy machine, and no pause
    ],
)
def test_the_watchdog_forgives_its_own_absence_alone(monkeypatch, waits, barks):
    """As after Ctrl-Z, which stops the watchdog too: the limit is 8 s of its presence."""
    ticks = Ticks(waits)
    monkeypatch.setattr(watchdog, "time", ticks)
    told = []
    dog = Watchdog(ProcessEnv(), 8.0)
    monkeypatch.setattr(dog, "_end_job", lambda: told.append(ticks.now))
    for doing, step in ((STEPPING, 1), (WAITING, 1), (STEPPING, 2)):
        dog.note(doing, step)
    dog._end = ticks
    dog._watch()
    assert len(told) == barks


def test_heartbeats_of_an_earlier_start_are_no_lost_processes_of_this_one(tmp_path, monkeypatch):
    """Process 0 of 2 writes first, and process 1 may take its time; if it hangs there, it is named."""
    names = {"0.json", "1.json", "10.json", "x.json", heartbeat.NAMED}
    for name in names:
        (tmp_path / name).write_text(json.dumps(asdict(beat(1))) if name == "1.json" else "")
        os.utime(tmp_path / name, (0, 0))
    heartbeat.clear(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [heartbeat.NAMED, "x.json"]
    dog = Watchdog(ProcessEnv(2, 0, "here:1"), 0)
    dog.beat_in(tmp_path)
    dog._heartbeat.stop(0)
    dog._look_for_lost()
    assert not dog._reported
    assert not (tmp_path / heartbeat.NAMED).read_text()
    monkeypatch.setattr(watchdog, "with_hosts", lambda processes: f"process {processes} on n1")
    assert dog._find_stragglers() == ["the others wait for process [1] on n1: no heartbeat since the start"]


def test_where_nothing_was_written_yet_there_is_nothing_to_clear(tmp_path):
    heartbeat.clear(tmp_path / "heartbeats")
    assert not list(tmp_path.iterdir())
