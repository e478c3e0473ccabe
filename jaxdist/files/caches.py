"""Where jaxdist keeps what it can make again. No folder need exist: whoever writes there makes it."""

from __future__ import annotations

import hashlib
import os
import platform
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


def cpu_programs_folder(cores: int) -> Path:
    """Return the folder where a run on CPUs keeps compiled programs: XLA deals their loops to so many cores."""
    return cache_folder() / f"programs-{processor()}-{cores}"


def processor() -> str:
    """Return a short name of the processor and of its instructions.

    XLA uses all instructions that the processor has: elsewhere the program would die of one that is missing.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = [platform.processor()]
    about = sorted({line for line in lines if line.startswith(("model name", "flags", "CPU part", "Features"))})
    return f"{platform.machine()}-{hashlib.sha256(repr(about or lines[:1]).encode()).hexdigest()[:12]}"
