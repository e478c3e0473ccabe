"""The parts of `bench gpu` are processes: one that hangs or dies takes no other with it."""

import re
import subprocess
import sys
import time
from pathlib import Path

from jaxdist.bench import gpu, gpu_process
from jaxdist.bench.gpu_process import Ended

PHASED = """
import sys, time, json, os, signal
sys.path.insert(0, {root!r})
from jaxdist.bench.gpu_process import Answer
told = Answer(sys.argv[2])
told.phase("measuring")
print("warming up", flush=True)
{measure}
told.write(value=7)
told.phase("tracing")
print("hm", flush=True)
{then}
"""


def run_code(code: str, limit: float = 60, environment=None) -> Ended:
    return gpu_process.run([sys.executable, "-c", code], {"n": 3}, environment or dict(gpu.os.environ), limit)


def phased(then: str, measure: str = "") -> str:
    return PHASED.format(root=str(Path(gpu.__file__).parents[2]), then=then, measure=measure)


def test_parts_end_in_time_and_one_that_dies_takes_no_other_with_it(monkeypatch):
    """In true processes: one sleeps, one raises, one is killed, one answers."""
    assert re.fullmatch(
        r"ended after \d+ s; its last words: nothing", run_code("import time; time.sleep(60)", 0.5).problem
    )
    assert run_code("raise ValueError('no such thing')").problem == (
        "its process ended with 1; its last words: ValueError: no such thing"
    )
    killed = "its process was killed by SIGKILL; its last words: nothing"
    assert run_code("import os; os.kill(os.getpid(), 9)").problem == killed
    good = (
        "import json, sys; n = json.load(open(sys.argv[1]))['n']; json.dump({'value': n + 1}, open(sys.argv[2], 'w'))"
    )
    assert run_code(good) == Ended(4, "")


def test_a_part_that_dies_leaves_what_it_found_its_phase_and_its_last_words(monkeypatch):
    died = run_code(phased("os.kill(os.getpid(), signal.SIGSEGV)"))
    assert died.value == 7
    assert re.fullmatch(
        r"its process was killed by SIGSEGV while tracing \(for \d+ s\); its last words: hm", died.problem
    )
    monkeypatch.setitem(gpu_process.PATIENCE, "tracing", 0.3)
    hung = run_code(phased("time.sleep(60)"))
    assert hung.value == 7
    assert re.fullmatch(r"ended after \d+ s while tracing \(for \d+ s\); its last words: hm", hung.problem)


def test_clocks_power_and_temperature_are_those_of_the_measurement(tmp_path, monkeypatch):
    """An nvidia-smi that is hot while the part measures, and idle for longer."""
    fake, idle, samples = tmp_path / "nvidia-smi", tmp_path / "idle", tmp_path / "samples"
    fake.write_text(
        f"#!{sys.executable}\nimport datetime, os, time\nprint('Unable to determine', flush=True)\n"
        f"samples = open({str(samples)!r}, 'a', buffering=1)\n"
        "while True:\n"
        f"    values = (345, 2619, '[N/A]', 30) if os.path.exists({str(idle)!r}) else (1755, 2619, 690.5, 65)\n"
        "    now = datetime.datetime.now().strftime('%Y/%m/%d %H:%M:%S.%f')[:-3]\n"
        "    print(now, *values, sep=', ', flush=True)\n"
        "    print('one', file=samples)\n"
        "    time.sleep(0.02)\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{gpu.os.environ['PATH']}")

    def sampled(times: int) -> str:
        known = f"len(open({str(samples)!r}).readlines())"
        return f"open({str(samples)!r}, 'a').close(); end = {known} + {times}\nwhile {known} < end: time.sleep(0.01)"

    ended = run_code(phased(f"open({str(idle)!r}, 'w').close()\n{sampled(60)}", measure=sampled(20)))
    assert ended.sensors == {"sm_mhz": 1755, "memory_mhz": 2619, "watts": 690.5, "celsius": 65}


def test_a_part_dies_with_the_bench(tmp_path):
    """An orphan would keep the memory of the GPU from the parts after it."""
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import os, sys; from jaxdist.bench import gpu_process\n"
        f"gpu_process.run([sys.executable, '-c', {child!r}], {{}}, dict(os.environ), 60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=Path(gpu.__file__).parents[2])
    deadline = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while Path(f"/proc/{pid.read_text()}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid.read_text()}").exists()
