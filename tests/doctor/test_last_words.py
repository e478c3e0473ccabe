"""The doctor of a run that has failed repeats the line of its log that says why."""

import pytest

from jaxdist.cluster.heartbeat import STEPPING, Heartbeat
from jaxdist.doctor import watching
from jaxdist.doctor.last_words import LONGEST, last_words

FULL = "stopped: the checkpoint of step 45 could not be saved: no space left on device"
LOGS = {
    "a reason": (["versions    jaxdist", "step 40/50", FULL], FULL),
    "a warning after it": (["versions    jaxdist", FULL, "warning: TensorBoard's files cannot be written"], FULL),
    "a traceback": (["versions    jaxdist", "Traceback", "", "KeyError: 'x'"], "KeyError: 'x'"),
    "an earlier start": (["versions    jaxdist", FULL, "versions    jaxdist", "OSError: other"], "OSError: other"),
    "a control character": (["versions    jaxdist", "stopped: \x1b[2J"], "stopped: \\u001b[2J"),
    "nothing": ([], None),
}


@pytest.mark.parametrize("name", LOGS)
def test_the_line_that_says_why(tmp_path, name):
    lines, expected = LOGS[name]
    (tmp_path / "log.txt").write_text("".join(f"2026-11-30T08:00:00Z  {line}\n" for line in lines))
    assert last_words(tmp_path / "log.txt") == expected


def test_a_long_log_and_a_link(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text("2026-11-30T08:00:00Z  step\n" * 10_000 + "2026-11-30T08:00:00Z  " + "x" * 2000 + "\n")
    assert last_words(log) == "x" * LONGEST
    (tmp_path / "link").symlink_to(log)
    assert last_words(tmp_path / "link") is None
    assert last_words(tmp_path / "none") is None


@pytest.mark.parametrize(("code", "said"), [(1, True), (0, False), (85, False), (None, False)])
def test_the_doctor_says_it_of_a_run_that_has_failed(tmp_path, monkeypatch, code, said):
    (tmp_path / "log.txt").write_text(f"2026-11-30T08:00:00Z  {FULL}\n")
    beat = Heartbeat(0, 1, "n0", 1, 45, STEPPING, 0.0, 1.0, 0.0, ended=code, time=1.0)
    monkeypatch.setattr(watching.heartbeat, "read", lambda folder, only=None: [beat])
    lines = watching.lines(watching.watch(tmp_path))
    assert (f"log.txt: {FULL}" in lines) == said
