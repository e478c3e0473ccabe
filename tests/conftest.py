"""Eight CPU devices stand for a node; compiled programs are kept, and other caches live in a folder of the session."""

import gc
import os
import signal
from importlib.metadata import version
from pathlib import Path

# Tests start hundreds of programs, each of which would compile the text of the package again: half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # read when jax is imported; its CUDA plug-in would look for a GPU
# Compiling is what most tests do. Machine code that is not optimised takes a third less time, and code for fusions by
# XLA's older way half of what is left. Code in one piece takes a fifth less CPU time than in pieces for many threads,
# whose cores the tests use already. The collectives of a program stay as they are, and its memory to 0.1 %.
# `XLA_FLAGS= pytest` optimises; so does CI's smoke set.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
    # The following flag is gone in 0.12, which dies of it.
    + " --xla_cpu_use_fusion_emitters=false" * version("jaxlib").startswith("0.10."),
)
# A compiled program is found again by all that it consists of: by its names, which some tests read in its text, and
# not by the lines that it comes from, which every edit moves. What tests start in other processes knows it too.
os.environ.setdefault("JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY", "true")
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")

import jax
import pytest

from jaxdist.process.stop_signals import SIGNALS
from jaxdist.programs import cross_compile
from tests import compile_forks, forks, program_cache, touched

# A collective of a virtual device may hold a thread of XLA until the others come. On a busy machine of 2 cores a step
# was once seen to wait for ever: more threads than cores, and than devices, cost nothing that could be measured.
os.environ.setdefault("NPROC", "32")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # made now, so that a command that a test runs in this process finds them and makes no others

TOUCHED = pytest.StashKey[tuple[str, list[str], set]]()
"""What is compared with, the files that differ, and the files of tests that can see them."""

EXHAUSTIVE = frozenset((Path(__file__).parent / "exhaustive.txt").read_text().splitlines())
"""Rows that only `--exhaustive` runs, beside those with that mark: the dearest of tests of which a third or more stays.

No test of a mutant is among them."""

SECONDS, LONG = "jaxdist/seconds", 0.5

THRESHOLD = 50_000, 20, 20
"""Objects that are made between two garbage collections. Tracing makes so many that Python's own numbers take a sixth
of its CPU time."""


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # and not in each process of pytest-xdist
        program_cache.prune()
    if config.getoption("--touched") is not None:
        base, changes = touched.changed(config.getoption("--touched"))
        tests = touched.Graph(touched.python_files()).tests(changes)
        config.stash[TOUCHED] = base, changes, {touched.ROOT / path for path in tests}


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="run the whole matrices, and nothing else")
    parser.addoption(
        "--touched",
        metavar="BASE",
        nargs="?",
        const="",
        help="run the files of tests that can see what has changed since BASE, the slowest tests last; without BASE: "
        "what is not committed, or, where all is, what this branch has changed",
    )


def pytest_ignore_collect(collection_path, config):
    """Files that cannot see the change are not even read."""
    if config.getoption("--touched") is None or not collection_path.match("test_*.py"):
        return None
    return collection_path not in config.stash[TOUCHED][2] or None


def pytest_collection_modifyitems(config, items):
    """`--exhaustive` runs the tests of that mark alone; without it they are left out."""
    for item in items:
        if item.nodeid in EXHAUSTIVE:
            item.add_marker("exhaustive")
    wanted = config.getoption("--exhaustive")
    left_out = [item for item in items if ("exhaustive" in item.keywords) != wanted]
    chosen = [item for item in items if ("exhaustive" in item.keywords) == wanted]
    config.hook.pytest_deselected(items=left_out)
    if config.getoption("--touched") is not None:
        workers = getattr(config, "workerinput", {"workercount": 1})["workercount"]
        chosen = touched.in_order(chosen, _seconds(config), workers)
    items[:] = chosen


def pytest_collection_finish(session):
    """The tests themselves, which live to the end, are left out of garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLD)


def _seconds(config) -> dict[str, float]:
    """Of the tests that took long when they ran last."""
    return config.cache.get(SECONDS, {}) if hasattr(config, "cache") else {}


def pytest_terminal_summary(terminalreporter, config):
    """Say what `--touched` has chosen, and keep what took long for the next time."""
    if config.getoption("--touched") is not None:
        base, changes, tests = config.stash[TOUCHED]
        terminalreporter.write_line(
            f"touched: {len(changes)} files differ from {base}; {len(tests)} files of tests can see them"
        )
    if hasattr(config, "cache"):
        seconds = _seconds(config)
        for report in terminalreporter.getreports("passed"):
            if report.when == "call" and (report.duration > LONG or report.nodeid in seconds):
                seconds[report.nodeid] = round(report.duration, 1)
        config.cache.set(SECONDS, seconds)


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """Nothing is read from, or left in, the home folder of the person who runs the tests."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["JAXDIST_CACHE"] = str(folder)
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(program_cache.folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return folder


@pytest.fixture(scope="session", autouse=True)
def compile_workers():
    """Processes that compile for other devices are forks, but for the tests of `own_process`."""
    cross_compile.run_worker = compile_forks.run_worker
    yield
    forks.close()


@pytest.fixture
def own_process(monkeypatch):
    """Let another process be started where one compiles for other devices, as the package does it."""
    monkeypatch.setattr(cross_compile, "run_worker", compile_forks.started)


@pytest.fixture
def heeding():
    """Let nobody handle or ignore the stop signals, as at the start of a command; yields the function that does it.

    Under nohup or in the background, the tests have inherited that some of them are ignored.
    """

    def heed():
        return {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}

    old = heed()
    yield heed
    for number, handler in old.items():
        signal.signal(number, handler)


def pytest_xdist_auto_num_workers(config):
    """Three processes: two that compile on little more than a core each, and one for the tests that wait for others.

    None for single files, which start faster.
    """
    return 0 if all(".py" in argument for argument in config.args) else 3
