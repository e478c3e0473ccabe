"""Data: sources, documents, tokens, rows and batches. `open` gives rows to programs that train in their own way."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxdist.data.opened import Rows, open

__all__ = ["Rows", "open"]


def __getattr__(name: str) -> object:
    """Import what programs use when it is asked for: requests are checked without numpy."""
    if name not in __all__:
        raise AttributeError(f"module 'jaxdist.data' has no attribute '{name}'")
    from jaxdist.data import opened

    return getattr(opened, name)
