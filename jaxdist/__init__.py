"""Train Flax models on any device mesh."""

import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxdist.api import STOPPED, Parallel, join, parallelize, scan, stack, staged
    from jaxdist.api.fit import fit

__all__ = ["STOPPED", "Parallel", "fit", "join", "parallelize", "scan", "stack", "staged"]
__version__ = "0.1.0"


def _is_a_command() -> bool:
    """Whether this is imported because one of its commands begins: `python -m jaxdist.train`, or `jaxdist train`."""
    words = sys.orig_argv
    if sys.argv[:1] == ["-m"] and "-m" in words[:-1]:  # so it is while Python looks for the module
        return words[words.index("-m") + 1].partition(".")[0] == "jaxdist"
    return len(words) > 1 and words[1].rpartition("/")[2] == "jaxdist"


if _is_a_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Ctrl-C while modules are imported would be a traceback; `request.run` brings the handler back.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def __getattr__(name: str) -> object:
    """Import the library when it is asked for, so that `--help` of a command needs no jax."""
    if name not in __all__:
        raise AttributeError(f"module 'jaxdist' has no attribute '{name}'")
    if name == "fit":
        # It imports the loop of train, which who only calls `parallelize` does not need.
        from jaxdist.api.fit import fit

        return fit
    from jaxdist import api

    return getattr(api, name)
