"""Eight CPU devices stand for a node; compiled programs are kept, and other caches live in a folder of the session."""

import os
import signal
from importlib.metadata import version

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
from tests import program_cache

# A collective of a virtual device may hold a thread of XLA until the others come. On a busy machine of 2 cores a step
# was once seen to wait for ever: more threads than cores, and than devices, cost nothing that could be measured.
os.environ.setdefault("NPROC", "32")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # made now, so that a command that a test runs in this process finds them and makes no others


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # and not in each process of pytest-xdist
        program_cache.prune()


def pytest_addoption(parser):
    parser.addoption("--exhaustive", action="store_true", help="run the whole matrices, and nothing else")


def pytest_collection_modifyitems(config, items):
    """`--exhaustive` runs the tests of that mark alone; without it they are left out."""
    wanted = config.getoption("--exhaustive")
    chosen = [item for item in items if ("exhaustive" in item.keywords) == wanted]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen


@pytest.fixture(scope="session", autouse=True)
def caches(tmp_path_factory):
    """Nothing is read from, or left in, the home folder of the person who runs the tests."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["JAXDIST_CACHE"] = str(folder)
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(program_cache.folder()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return folder


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
