"""`jaxdist.join`: scripts of a user's own, whose processes meet, and end together however one of them ends."""

import os
import re
import sys

import pytest

from jaxdist.cluster import kv_store, script
from jaxdist.cluster.process_env import JAX, ProcessEnv
from jaxdist.config import RequestError
from tests import forks
from tests.processes import free_port, started, wait

SCRIPT = """
import os, signal, sys, time
import jaxdist
place = jaxdist.join()
assert jaxdist.join() is place
me = place.process
{does}
"""


def processes(does: str, count: int = 2):
    """The processes of a script that joins, and does this."""
    port = free_port()
    places = [ProcessEnv(count, me, f"127.0.0.1:{port}") for me in range(count)]
    command = [sys.executable, "-u", "-c", SCRIPT.format(does=does)]
    environments = [os.environ | place.variables | {"JAX_PLATFORMS": "cpu"} for place in places]
    return started([command] * count, environments)


def ended(does: str, code: int, seconds: float = 120) -> list[str]:
    """What each process said; all must end with `code`."""
    with processes(does) as running:
        wait(running, seconds, code)
        return [process.said() for process in running]


MEET = """
import jax, subprocess
print(place, place.leader, jax.device_count())
print('\\x1b[0m')
subprocess.run('echo ${JAX_PROCESS_ID:-none}', shell=True)
print([place.should_stop() for _ in range(9)] == [False] * 9)
if me == 0: time.sleep(2)
"""


def test_they_meet_and_wait_for_the_last():
    """What they and their children print stays as it is; the children are no processes of the job; nothing stops."""
    rest = "\x1b[0m\nnone\nTrue\n"
    assert ended(MEET, 0) == [f"process 0 of 2 True 2\n{rest}", f"process 1 of 2 False 2\n{rest}"]


def test_an_exit_code_is_kept():
    ended("sys.exit(3)", 3)


WAITS = "\ntime.sleep(1000)"


def test_an_exception_in_one_ends_all():
    first, second = ended("if me == 1: raise KeyError('x')" + WAITS, 1)
    assert re.search(r"process 0\] ended because process 1 failed; this process was running its script\n$", first)
    assert re.search(r"process 1\] KeyError: 'x'\n$", second)


def test_a_mistake_in_the_request_is_a_sentence():
    does = "from jaxdist.config import RequestError\nif me == 1: raise RequestError('no such mesh')" + WAITS
    assert re.fullmatch(r"\[\S+ process 1\] no such mesh\n", ended(does, 2)[1])


@pytest.mark.parametrize(
    ("program", "fragment"),
    [
        ("from jaxdist.cluster.script import check_joined\ncheck_joined()", "but it has not joined the others; call"),
        ("import jax, jaxdist\njax.devices()\njaxdist.join()", "calls jaxdist.join() after jax has made its devices"),
    ],
)
def test_who_cannot_join_is_told_so_and_not_started_again(program, fragment):
    environment = os.environ | ProcessEnv(2, 1, "127.0.0.1:1").variables | {"JAX_PLATFORMS": "cpu"}
    done = forks.run([sys.executable, "-c", program], env=environment)
    assert done.returncode == 2
    assert fragment in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interrupt_ends_all():
    # A shell starts what runs in its background with the signal ignored.
    listens = "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    first, second = ended(f"{listens}if me == 0: os.kill(os.getpid(), signal.SIGINT)" + WAITS, 85)
    assert re.fullmatch(r"\[\S+ process 0\] interrupted\n", first)
    assert "ended because process 0 was interrupted" in second


@pytest.mark.parametrize("early", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_who_waits_at_its_end_says_so_and_not_for_ever(early):
    patch = "from jaxdist.cluster import script\nscript.QUIET_SECONDS, script.LAST_SECONDS = 0.5, 2.0\n"
    said = ended(f"{patch}if me != {early}: time.sleep(1000)", 1)
    assert f"process {early}] has come to its end, and waits for the other processes; after 2 s" in said[early]
    assert f"process {early}] not all others have come to their end in 2 s" in said[early]
    assert f"ended because process {early} failed" in said[1 - early]


STEPS = """
for step in range(1000):
    if place.should_stop(): break
    if step == 5 and me == {signalled}: os.kill(os.getpid(), signal.{name})
    time.sleep(0.02 + 0.05 * me)
print(step)
sys.exit(jaxdist.STOPPED)
"""


@pytest.mark.parametrize(("signalled", "name"), [pytest.param(0, "SIGTERM", marks=pytest.mark.slow), (1, "SIGUSR1")])
def test_a_signal_to_one_stops_all_at_the_same_step(signalled, name):
    first, second = ended(STEPS.format(signalled=signalled, name=name), 85)
    assert first == second
    assert 5 < int(first) < 1000


@pytest.mark.slow
def test_who_does_not_end_in_time_is_ended(monkeypatch):
    monkeypatch.setenv("JAXDIST_GRACE_SECONDS", "4")
    first, second = ended(STEPS.format(signalled=1, name="SIGHUP").replace("break", "time.sleep(1000)"), 85)
    assert "stopped by SIGHUP (running its script): the 4 s of checkpoint.grace_seconds are over" in first
    assert second == ""


def test_alone_it_does_nothing():
    program = "import jaxdist, sys; print(jaxdist.join(), sys.excepthook is sys.__excepthook__)"
    environment = {name: text for name, text in os.environ.items() if name not in JAX}
    done = forks.run([sys.executable, "-c", program], env=environment)
    assert done.stdout == "process 0 of 1 True\n"


@pytest.fixture
def unjoined(monkeypatch):
    """A process that has not joined, of the two that its environment names."""
    monkeypatch.setattr(script, "_joined", [])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for name, text in ProcessEnv(2, 1, "127.0.0.1:1234").variables.items():
        monkeypatch.setenv(name, text)


def test_jax_must_not_be_in_use(unjoined, monkeypatch):
    monkeypatch.setattr(script.xla_bridge, "backends_are_initialized", lambda: True)
    with pytest.raises(RequestError, match=r"process 1 of 2 calls jaxdist.join\(\) after jax has made its devices"):
        script.join()


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ({"processes": 3}, "--cluster.processes 3 is given, but --cluster.process-id is missing"),
        ({"processes": 3, "process_id": 3}, "the --cluster options say that this is process 3 of 3, but"),
        ({"processes": "two"}, "processes is 'two': Input should be a valid integer"),
    ],
)
def test_arguments(unjoined, arguments, fragment):
    with pytest.raises(RequestError, match=re.escape(fragment)):
        script.join(**arguments)


def test_the_grace_period_is_a_number(unjoined, monkeypatch):
    monkeypatch.setenv("JAXDIST_GRACE_SECONDS", "soon")
    with pytest.raises(RequestError, match="JAXDIST_GRACE_SECONDS is 'soon' in the environment; it must be a number"):
        script.join(processes=1)


def test_parallelize_needs_it(unjoined, monkeypatch):
    with pytest.raises(
        RequestError, match=r"JAX_NUM_PROCESSES and JAX_PROCESS_ID say that this is process 1 of 2, but"
    ):
        script.check_joined()
    monkeypatch.delenv("JAX_PROCESS_ID")  # incomplete: nothing is known
    script.check_joined()


def test_who_asks_to_be_alone_is(unjoined):
    assert script.join(processes=1).processes == 1
    script.check_joined()


def test_who_has_met_by_jax_itself_is_not_met_again(monkeypatch):
    monkeypatch.setattr(script, "_joined", [])
    hooked = []
    monkeypatch.setattr(script, "_end_together", lambda env, place: hooked.append(place))
    monkeypatch.setattr(kv_store, "processes", lambda: 2)
    monkeypatch.setattr(kv_store, "process", lambda: 1)
    monkeypatch.setattr(script.rendezvous, "members", list)
    monkeypatch.setattr(kv_store, "coordinator", lambda: "127.0.0.1:1")
    script.check_joined()
    place = script.join()
    assert (place.process, place.processes) == (1, 2)
    assert hooked == [place]
