"""Train Flax models on any device mesh."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxdist.api import Parallel, parallelize, scan, stack, staged

__all__ = ["Parallel", "parallelize", "scan", "stack", "staged"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """The library is imported when it is asked for, so that `--help` of a command needs no jax."""
    if name not in __all__:
        raise AttributeError(f"module 'jaxdist' has no attribute '{name}'")
    from jaxdist import api

    return getattr(api, name)
