"""Eight CPU devices stand for a node; caches live in a folder of the test session."""

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

import jax
import pytest

from jaxdist.process.stop_signals import SIGNALS

# A collective of a virtual device may hold a thread of XLA until the others come. On a busy machine of 2 cores a step
# was once seen to wait for ever: more threads than cores, and than devices, cost nothing that could be measured.
os.environ.setdefault("NPROC", "32")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # made now, so that a command that a test runs in this process finds them and makes no others


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
    jax.config.update("jax_compilation_cache_dir", str(folder / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
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
