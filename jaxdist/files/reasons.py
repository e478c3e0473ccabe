"""Why the operating system refuses a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxdist.config import RequestError


def reason(error: OSError) -> str:
    """Return why a file cannot be used, as the end of a sentence."""
    return (error.strerror or str(error)).lower()


def why_closed(folder: Path) -> str | None:
    """Return why nobody can look into `folder`, as the end of a sentence about it; None if one can.

    `os.path.isfile` of a file in a folder without permission is false: that says nothing of the file.
    """
    try:
        # `Path` drops the dot, for which a right to the folder itself is needed.
        os.stat(os.path.join(folder, "."))
    except FileNotFoundError:
        return "does not exist"
    except NotADirectoryError:
        return "is no folder"
    except PermissionError:
        return "cannot be looked into: no permission"
    except OSError as error:
        return f"cannot be looked into: {reason(error)}"
    return None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an `OSError` from reading the data at `path` into a `RequestError`."""
    try:
        yield
    except OSError as error:
        raise RequestError(f"'{path}' cannot be read ({error.strerror or error}); make it readable") from error
