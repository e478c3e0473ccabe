"""`fault.notify`: what a run posts when it fails or stops early, and that nothing fails by it."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from jaxdist import train
from jaxdist.cluster import faults
from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.config import Busy, RequestError
from jaxdist.output.streams import LogFile
from jaxdist.training import notice
from jaxdist.training.run_dir import RunFolder


@pytest.fixture
def server():
    """A server on this host that keeps what is posted, and answers with its `answer`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            kept.posted.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            time.sleep(kept.delay)
            self.send_response(kept.answer)
            self.end_headers()

        def log_message(self, *_):
            pass

    kept = HTTPServer(("127.0.0.1", 0), Handler)
    kept.posted, kept.answer, kept.delay = [], 200, 0
    kept.address = f"http://127.0.0.1:{kept.server_port}/secret?key=hidden"
    thread = threading.Thread(target=kept.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield kept
    kept.shutdown()
    thread.join()
    kept.server_close()


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`train` in one process, whose loop is replaced by a function of the job; returns the exit code."""

    def main(address, loop):
        def played(run, folder, job):
            job.log.open(tmp_path / "log.txt", rotates=False)
            job.note("stepping", 7)
            assert run.config.fault.notify == ""  # nothing can save it
            return loop(job)

        monkeypatch.setattr("jaxdist.training.train_run.train", played)
        return train.main(["--mesh=1x1x1", f"--run-dir={tmp_path / 'mine'}", f"--fault.notify={address}"])

    return main


def says(line, code):
    def loop(job):
        job.log.write(f"before\n{line}")
        return code

    return loop


@pytest.mark.parametrize(
    ("code", "outcome", "line"),
    [
        (1, "failed", "stopped: the loss is not finite after step 7"),
        (85, "stopped", "stopped by SIGTERM: step 7 is saved; the same command continues"),
    ],
)
def test_a_run_that_ends_early_posts_one_json(server, run, code, outcome, line):
    assert run(server.address, says(line, code)) == code
    told = {"run": None, "folder": "mine", "step": 7, "outcome": outcome, "exit_code": code, "reason": line}
    assert server.posted == [("/secret?key=hidden", told)]


def test_a_run_that_is_done_posts_nothing(server, run):
    assert run(server.address, says("done", 0)) == 0
    assert run("", says("stopped", 1)) == 1
    assert server.posted == []


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (OSError("the disk is gone"), 1, "OSError: the disk is gone"),
        (RequestError("first", "mesh 3x1x1 does not fit"), 2, "mesh 3x1x1 does not fit"),
        (Busy("in use"), None, ""),  # a launcher tries again, every minute
    ],
)
def test_an_error_is_told_by_its_sentence(server, run, error, code, reason):
    def loop(job):
        raise error

    hooks = list(faults.exit_hooks)
    with pytest.raises(type(error)):
        run(server.address, loop)
    assert [(told["exit_code"], told["reason"]) for _, told in server.posted] == [(code, reason)] * (code is not None)
    assert faults.exit_hooks == hooks


@pytest.mark.parametrize("what", ["refused", "silent", "closed"])
def test_a_post_that_fails_is_one_line_in_the_log(server, run, monkeypatch, tmp_path, what):
    """`log.txt` has the host, and not what may be secret in the address."""
    address = server.address
    if what == "refused":
        server.answer, why = 500, "HTTP Error 500"
    elif what == "silent":
        server.delay, why = 0.5, "no answer in 0.2 s"
        monkeypatch.setattr(notice, "SECONDS", 0.2)
    else:
        address, why = "http://127.0.0.1:1/secret", "Connection refused"
    began = time.monotonic()
    assert run(address, says("stopped by SIGTERM", 85)) == 85
    assert time.monotonic() - began < 60
    last = (tmp_path / "log.txt").read_text().splitlines()[-1]
    assert "no notice could be given to 127.0.0.1: " in last
    assert why in last
    assert "secret" not in last


@pytest.mark.parametrize("process", [0, 1])
def test_of_several_processes_the_first_posts_and_only_at_the_end(server, tmp_path, process):
    """An error ends all by `faults.fail`, which says its reason and then calls the hooks."""
    log = LogFile()
    job = SimpleNamespace(env=ProcessEnv(2, process, "h:1"), log=log, watchdog=SimpleNamespace(step=3))
    hooks = list(faults.exit_hooks)
    try:
        with pytest.raises(OSError, match="gone"), notice.giving_notice(server.address, RunFolder(tmp_path), job):
            raise OSError("gone")
        assert server.posted == []
        log.write("ended because process 1 failed")
        for hook in faults.exit_hooks[len(hooks) :] * 2:
            hook(1)
    finally:
        faults.exit_hooks[:] = hooks
    reasons = [told["reason"] for _, told in server.posted]
    assert reasons == ["ended because process 1 failed"] * (process == 0)
