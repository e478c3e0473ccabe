"""`scripts/gpu_session.sh`, which needs no internet, and the commands that parts of `bench gpu` run."""

import importlib
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from jaxdist.bench import gpu, gpu_runs
from jaxdist.bench.measuring import ignore
from jaxdist.request import outcome
from scripts import gpu_session
from tests.bench.tiny import TINY, last


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Write a wheel of one module."""
    described = "\n".join([f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {one}" for one in needs)])
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}.py", "")
        archive.writestr(f"{name}-{version}.dist-info/METADATA", described + "\n\n")


def test_wheels_of_what_is_missing_or_too_old_are_unpacked(tmp_path, monkeypatch):
    """Also what an unpacked one needs exactly, which an image has in another version."""
    installed = {"old": "1.0", "core": "1.0", "fine": "2.5"}
    monkeypatch.setattr(gpu_session, "version_of", lambda name: installed.get(name, ""))
    monkeypatch.setattr(gpu_session, "requirements", lambda: ["old>=2", "fine>=2", "Not-Carried>=1"])
    wheel(tmp_path, "old", "2.0", "core==1.1", "later; extra == 'later'")
    wheel(tmp_path, "core", "1.1")
    wheel(tmp_path, "fine", "2.6")
    site = tmp_path / "site"
    lines = sorted(gpu_session.install(tmp_path, site))
    assert lines == [
        "Not-Carried>=1 is needed, no version is installed, and no wheel is carried",
        "core-1.1-py3-none-any.whl unpacked; 1.0 is installed",
        "old-2.0-py3-none-any.whl unpacked; 1.0 is installed",
    ]
    assert sorted(path.name for path in site.glob("*.py")) == ["core.py", "old.py"]
    assert gpu_session.install(tmp_path, site) == lines[:1]


REPOSITORY = Path(gpu.__file__).parents[2]

SMALL = (
    "--model.layers=1",
    "--model.embed=16",
    "--model.heads=2",
    "--model.sequence=16",
    "--train.global-batch-size=2",
)


@pytest.mark.exhaustive
def test_a_run_is_killed_and_resumed(tmp_path, monkeypatch):
    """In true commands, which take the programs of the first of them."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    options = [*SMALL, f"--data.path={REPOSITORY / 'LICENSE'}"]
    first, then = (dict(found) for found in gpu_runs.train(ignore, str(tmp_path), 8, options))
    assert first["steps"] == 8
    assert "killed" not in first["told"]
    assert then["largest_difference"] == 0
    assert 4 <= then["killed_after"] < 8


@pytest.mark.parametrize(("part", "given"), [("evaluate", {}), ("generate", {"tokens": 4}), ("profile", None)])
def test_commands_take_the_options_that_parts_give_them(part, given, tmp_path, monkeypatch, capsys):
    """They refuse the run that is not there, or the config, and no option."""
    said = []

    def command(where, name, command, *words, fails=False):
        said.append(outcome(importlib.import_module(f"jaxdist.{command}").main, list(words)))
        return "{}"

    monkeypatch.setattr(gpu_runs, "_command", command)
    given = {"config": "no-such", "options": []} if given is None else given
    last(gpu_runs.PARTS[part](ignore, str(tmp_path), **given))
    assert said == [2]
    assert "unknown option" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_of_the_session_on_a_cpu(tmp_path):
    """The script, the bench and a part, in true processes: the bench is killed in its part, and is begun again."""
    tiny = tmp_path / "tiny.toml"
    tiny.write_text(TINY.replace("layers = 3", "layers = 1"))
    script = REPOSITORY / "scripts" / "gpu_session.sh"
    state, out = tmp_path / "state", tmp_path / "out"
    argv = [script, "--state", state, "--out", out, "--wheels", tmp_path, "--models", tiny, "--rows", "2"]
    argv += ["--parts", "models", "--repeats", "1", "--warmup", "1"]
    environment = gpu.os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"}

    def call(*words: str) -> subprocess.CompletedProcess:
        words = [*argv, *words]
        return subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    first = call("--wait=0.1")
    assert first.returncode == 3, first
    assert "the same command waits for more of it" in first.stdout
    deadline = time.monotonic() + 60
    while not (state / "gpu.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    gpu.os.kill(int((state / "pid").read_text()), 9)
    rest = call("--wait=590")
    (part,) = json.loads((out / "gpu.json").read_text())["parts"]
    assert (part["state"], part["attempts"]) == ("done", 2), rest.stdout
    model = part["value"]
    assert model["tokens_per_second"] == pytest.approx(64 / model["step_seconds"])
    assert sum(model["kernels"]["seconds"].values()) > 0
    assert rest.returncode == 0
    assert (out / "gpu.md").read_text() in rest.stdout
    changed = call("--steps=3")
    assert changed.returncode == 2
    assert "holds a result with other --steps; ask for the same" in changed.stdout
