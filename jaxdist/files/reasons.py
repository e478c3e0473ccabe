"""Why the operating system refuses a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxdist.config import RequestError


def reason(error: OSError) -> str:
    """Return why a file cannot be used, as the end of a sentence."""
    return (error.strerror or str(error)).lower()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` from reading the data at `path` into a `RequestError`."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"'{path}' cannot be read ({error.strerror or error}); make it readable") from error
