"""Why the operating system refuses a file."""

from __future__ import annotations


def reason(error: OSError) -> str:
    """Return why a file cannot be used, as the end of a sentence."""
    return (error.strerror or str(error)).lower()
