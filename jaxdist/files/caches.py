"""Where jaxdist keeps what it can make again. No folder need exist: whoever writes there makes it."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return $JAXDIST_CACHE, or $XDG_CACHE_HOME/jaxdist, or ~/.cache/jaxdist."""
    own = os.environ.get("JAXDIST_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jaxdist"


def programs_folder() -> Path:
    """Return the folder where a run on GPUs keeps compiled programs."""
    return cache_folder() / "programs"
