"""What is asked of XLA for GPUs: known to the version that is here, after what the user has set, and not on a CPU."""

import json
import os
import re
import stat
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import xla_bridge

from jaxdist.cluster import gpus, xla_options
from jaxdist.files import caches
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.process.gpu_memory import FRACTIONS, gpu_share
from tests.processes import ROOT, told
from tests.tiers import thinned

NAMES = [
    *FRACTIONS,
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_FLAGS",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
]


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch):
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that what is set here goes away with the test
        monkeypatch.delenv(name)
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [(name, getattr(jax.config, name)) for name in names]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before:
        jax.config.update(name, value)


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one, whose backend has not started."""
    monkeypatch.setattr(gpus, "visible", lambda: ["0"])
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)


def test_this_jaxlib_knows_every_option():
    """XLA reads them alike for every device; and it would not take another name."""
    assert xla_options.series() in xla_options.OPTIONS
    compiled = lambda asked: jax.jit(jnp.sin, compiler_options=asked).lower(1.0).compile()
    compiled(xla_options.options("gpu", 2, across=False))
    compiled(xla_options.options("gpu", 2, across=True))
    with pytest.raises(RuntimeError, match="xla_gpu_no_such_option"):
        compiled({"xla_gpu_no_such_option": True})


def test_the_lists():
    assert set(xla_options.OPTIONS) == {"0.10", "0.11", "0.12"}
    assert version("jaxlib").startswith(xla_options.series() + ".")
    for found in xla_options.OPTIONS.values():
        assert len(found) <= 3
        assert len({one.name for one in found}) == len(found)
        assert all(re.fullmatch(r"xla_gpu_\w+", one.name) and one.reason for one in found)


def test_a_version_that_is_not_listed_gets_none(monkeypatch):
    monkeypatch.setattr(xla_options, "version", lambda name: "0.13.1")
    assert xla_options.options("gpu", 2, across=False) == xla_options.options("gpu", 2, across=True) == {}


def test_only_steps_for_several_gpus_have_options(monkeypatch):
    monkeypatch.setattr(xla_options, "OPTIONS", {xla_options.series(): (xla_options.GATHER,)})
    assert set(xla_options.options("gpu", 8, across=True)) == {xla_options.GATHER.name}
    assert xla_options.options("gpu", 1, across=True) == xla_options.options("cpu", 8, across=True) == {}


def test_a_deterministic_step_has_its_option_on_one_gpu_too(monkeypatch):
    """With any jaxlib, unless the user has set it, or the one that contains it; on CPUs there is nothing to set."""
    (name, also) = xla_options.DETERMINISTIC.name, xla_options.DETERMINISTIC.also
    asked = lambda platform, devices: xla_options.options(platform, devices, False, deterministic=True)
    assert asked("gpu", 1) == {name: True}
    assert asked("gpu", 8) == xla_options.options("gpu", 8, across=False) | {name: True}
    assert asked("cpu", 8) == {}
    jax.jit(jnp.sin, compiler_options=asked("gpu", 1)).lower(1.0).compile()
    monkeypatch.setattr(xla_options, "version", lambda name: "0.13.1")
    assert asked("gpu", 8) == {name: True}
    monkeypatch.setenv("XLA_FLAGS", f"--{also}=true")
    assert asked("gpu", 8) == {}


@pytest.mark.parametrize(("across", "sequence"), [(False, False), (True, False), (True, True)])
def test_delayed_gradients_and_keys_of_a_ring_may_travel_beside_other_collectives(across, sequence):
    """One option more than otherwise, on several GPUs alone."""
    one = xla_options.options("gpu", 8, across, sequence)
    several = xla_options.options("gpu", 8, across, sequence, several=True)
    assert several == one | {xla_options.OVERLAP.name: 4}
    jax.jit(jnp.sin, compiler_options=several).lower(1.0).compile()
    assert xla_options.options("cpu", 8, across, sequence, several=True) == {}


def test_the_initial_state_is_compiled_with_little_optimization_on_a_cpu_alone(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    options = xla_options.options_for_init("cpu")
    made = jax.jit(lambda key: jax.random.normal(key, (4,)), compiler_options=options)(jax.random.key(0))
    assert options
    assert (made == jax.random.normal(jax.random.key(0), (4,))).all()
    assert xla_options.options_for_init("gpu") == {}
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    assert xla_options.options_for_init("cpu") == {}


@pytest.mark.parametrize(
    ("text", "sequence", "ahead"),
    [
        ("4x1x1", False, False),
        ("8x1x1", False, True),
        ("data=4,replica=2", False, False),
        ("2x4x1", False, True),
        ("2x4x1", True, False),
        ("2x2x2", False, False),
        ("context=8", False, True),
        ("data=2,context=4", False, True),
    ],
)
def test_layers_are_gathered_ahead_where_data_goes_from_host_to_host(monkeypatch, text, sequence, ahead):
    """Four devices in each. Replicas and stages are outermost, and may be across hosts where data is not. With sequence
    parallelism they are not, because activations would be too."""
    monkeypatch.setattr(xla_options, "OPTIONS", {xla_options.series(): (xla_options.GATHER,)})
    there = lambda number: SimpleNamespace(platform="gpu", process_index=number // 4)
    shape = abstract_mesh(parse_mesh(text))
    devices = np.array([there(number) for number in range(shape.size)]).reshape(tuple(shape.shape.values()))
    mesh = SimpleNamespace(devices=devices, size=shape.size, shape=shape.shape, axis_names=shape.axis_names)
    assert bool(xla_options.options_for(mesh, sequence)) == ahead


@pytest.mark.parametrize("form", ["--{}=false", "--xla_dump_to=/tmp/x --{}", "file"])
def test_what_xla_flags_name_is_left_to_them(form, monkeypatch, tmp_path):
    one = xla_options.GATHER
    monkeypatch.setattr(xla_options, "OPTIONS", {xla_options.series(): (one,)})
    assert set(xla_options.options("gpu", 2, across=True)) == {one.name}
    for name in (one.name, one.also):
        (tmp_path / "flags").write_text(f"--{name}=false")
        monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags") if form == "file" else form.format(name))
        assert xla_options.options("gpu", 2, across=True) == {}


@pytest.mark.parametrize(
    ("environment", "share"),
    [
        ({}, 0.92),
        ({FRACTIONS[0]: "0.5"}, 0.5),
        ({FRACTIONS[1]: "0.6"}, 0.6),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, 0.75),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false", FRACTIONS[0]: "0.5"}, 0.5),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, 0.92),
    ],
    ids=str,
)
def test_memory(environment, share, gpu, monkeypatch):
    """JAX takes what jaxdist says that it takes: what the user has set, or all but a little."""
    from jaxlib import xla_client

    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    xla_options.take_memory()
    asked = xla_client.generate_pjrt_gpu_plugin_options()  # as the plug-in reads the environment
    assert asked.get("memory_fraction", 0.75) == gpu_share() == share
    assert (FRACTIONS[0] in os.environ) == (share in (0.92, 0.5))


def test_memory_is_left_alone_once_a_backend_has_started(gpu, monkeypatch):
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: True)
    xla_options.take_memory()
    assert FRACTIONS[0] not in os.environ


def kept(folder, devices: int = 1) -> tuple[str | None, list[str]]:
    """The folder of compiled programs, and what is said of it."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla_options, "programs_folder", lambda: folder)
        patch.setattr(xla_options, "cpu_programs_folder", lambda cores: folder)
        xla_options.keep_programs(devices, said.append)
    return jax.config.jax_compilation_cache_dir, said


def test_programs_are_kept_for_this_user_alone(gpu, tmp_path):
    folder = tmp_path / "cache" / "programs"
    assert kept(folder) == (str(folder), [])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(folder.iterdir()) == []
    assert "autotune_cache_dir" in jax.config.jax_persistent_cache_enable_xla_caches


def test_a_folder_of_the_users_own_is_left(gpu, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/mine")
    assert kept(tmp_path / "programs") == (None, [])
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    jax.config.update("jax_compilation_cache_dir", "/mine")
    assert kept(tmp_path / "programs") == ("/mine", [])
    assert not (tmp_path / "programs").exists()


def test_programs_are_not_kept_where_others_could_change_them(gpu, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o770)
    found, (note,) = kept(tmp_path / "open")
    assert found is None
    assert "may be written by others" in note
    (tmp_path / "file").touch()
    assert "cannot be made (not a directory)" in kept(tmp_path / "file" / "programs")[1][0]


def test_programs_are_not_kept_behind_a_link_of_somebody_elses(gpu, tmp_path, monkeypatch):
    link, lstat = tmp_path / "programs", Path.lstat
    (tmp_path / "disk").mkdir(mode=0o700)
    link.symlink_to(tmp_path / "disk")
    assert kept(link) == (str(link), [])
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(Path, "lstat", lambda path: SimpleNamespace(st_uid=lstat(path).st_uid + 1))
    found, (note,) = kept(link)
    assert found is None
    assert "is another user's" in note


KEPT = """
from pathlib import Path
from jaxdist.cluster import gpus, preflight, xla_options
gpus.visible = lambda: ["0"]
xla_options.programs_folder = lambda: Path(arguments[process])
preflight.PATIENCE = 0.1
said = []
xla_options.keep_programs(1, said.append)
tell([process, jax.config.jax_compilation_cache_dir, said])
"""


@pytest.mark.parametrize("wrong", thinned([("another folder",), ("on process 0",), ("on process 1",), ("",)], 4))
def test_processes_keep_programs_together_or_not_at_all(wrong, tmp_path):
    """Process 0 says why."""
    good, other = tmp_path / "programs", tmp_path / "other"
    if wrong.startswith("on"):
        other.mkdir()
        other.chmod(0o770)
    folders = {"": (good, good), "on process 0": (other, good)}.get(wrong, (good, other))
    why = "may be written by others" if wrong.startswith("on") else "is not the same folder on all hosts"
    found = sorted(told(KEPT, 2, *map(str, folders), devices=2))
    assert [kept for _, kept, _ in found] == [None if wrong else str(good)] * 2
    (_, _, said), (_, _, nothing) = found
    assert nothing == []
    assert len(said) == bool(wrong)
    assert all(why in note for note in said)
    assert list(good.iterdir()) == []


@pytest.mark.slow
def test_a_second_run_on_a_cpu_reads_the_programs_of_the_first(tmp_path):
    """What a killed process has left of one is no reason to fail, and the numbers are the same."""
    text = tmp_path / "text.txt"
    text.write_text("a few words " * 500)
    small = [
        "--model.layers=1",
        "--model.embed=16",
        "--model.heads=2",
        "--model.sequence=16",
        "--train.steps=1",
        "--data.validation-fraction=0.2",
    ]
    python = [sys.executable, "-m"]
    command = [*python, "jaxdist.train", "--data.path", text, *small, "--run-dir"]
    environment = {**os.environ, "JAXDIST_CACHE": str(tmp_path), "PYTHONPATH": str(ROOT)}
    # All are kept: how long one takes to compile differs from run to run.
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

    def losses(run) -> tuple[str, list]:
        done = subprocess.run(
            [*command, tmp_path / run], env=environment, capture_output=True, text=True, timeout=240, check=True
        )
        rows = [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        return done.stderr, [(row.get("loss"), row.get("grad_norm"), row.get("validation_loss")) for row in rows]

    _, first = losses("first")
    (folder,) = tmp_path.glob("programs-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    programs = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    (step,) = (path for path in programs if path.name.startswith("jit_train-"))
    _, second = losses("second")
    assert second == first
    assert {path: path.stat().st_mtime_ns for path in programs} == programs  # a slow machine keeps further ones
    step.write_bytes(step.read_bytes()[:-100])
    said, third = losses("third")
    assert third == first
    assert "Error reading persistent compilation cache entry for 'jit_train'" in said
    evaluate = [*python, "jaxdist.evaluate", tmp_path / "first"]
    subprocess.run(evaluate, env=environment, capture_output=True, timeout=240, check=True)
    assert set(folder.iterdir()) > set(programs)


def test_programs_for_a_cpu_are_kept_where_they_will_be_found(tmp_path, monkeypatch):
    """Not for several devices, nor by one of several processes, nor where reading them was not tried."""
    with monkeypatch.context() as several:
        several.setattr(xla_options.kv_store, "processes", lambda: 2)
        assert kept(tmp_path / "programs") == (None, [])
    assert kept(tmp_path / "programs", devices=2) == (None, [])
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(sys, "platform", "darwin")
        assert kept(tmp_path / "programs") == (None, [])
    with monkeypatch.context() as later:
        later.setattr(xla_options, "series", lambda: "0.99")
        assert kept(tmp_path / "programs") == (None, [])
    assert list(tmp_path.iterdir()) == []
    assert kept(tmp_path / "programs") == (str(tmp_path / "programs"), [])
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.1


def test_each_kind_of_machine_has_a_folder_of_its_own(monkeypatch):
    here = caches.cpu_programs_folder(2)
    assert here == caches.cpu_programs_folder(2) != caches.cpu_programs_folder(4)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags: fewer\n")
    assert here != caches.cpu_programs_folder(2)


def test_nothing_is_set_on_a_cpu(tmp_path):
    xla_options.take_memory()
    assert FRACTIONS[0] not in os.environ
    assert xla_options.summary_line("cpu", {}) == ""
    assert xla_options.settings("cpu", {})["memory_fraction"] is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_tells_it(gpu, tmp_path):
    xla_options.take_memory()
    kept(tmp_path / "programs")
    asked = xla_options.settings("gpu", {"xla_gpu_one": False})
    assert asked["compiler_options"] == {"xla_gpu_one": False}
    assert asked["memory_fraction"] == 0.92
    assert asked["compilation_cache"] == str(tmp_path / "programs")
    line = xla_options.summary_line("gpu", {"xla_gpu_one": False, "xla_gpu_two": f"{xla_options.MODE}ON"})
    assert line.startswith("xla_gpu_one=false, xla_gpu_two=on; JAX takes")
    assert f"JAX takes 92% of a GPU's memory; programs kept in {tmp_path}" in line
