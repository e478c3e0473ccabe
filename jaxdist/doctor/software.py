"""Checks of what is installed and set, before JAX is imported.

A setting that would end the process is reported, and removed from the doctor's own environment, so that the later
checks still run.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import mmap
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from jaxdist.doctor.findings import Finding, Here, ok, unchecked, warning, wrong
from jaxdist.output.units import counted
from jaxdist.process.gpu_memory import FRACTIONS, GPU_SHARE, preallocates

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

PLUGINS = {cuda: (f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt") for cuda in (12, 13)}
"""The two packages of JAX's plug-in for NVIDIA GPUs, by the version of CUDA."""

PARSE = "from jaxlib import xla_client; xla_client.CompileOptions()"
"""The shortest program that reads XLA_FLAGS."""

ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm", "address")


def versions(here: Here) -> Iterator[Finding]:
    """Check that Python, JAX and the packages on top of it are installed, and fit what each of them requires."""
    found = {name: installed(name) for name in PACKAGES}
    missing = [name for name in PACKAGES if not found[name]]
    for name in missing:
        yield wrong("versions", f"{name} is not installed", f"{sys.executable} -m pip install {name}")
    clashes = [clash for name in ("jaxdist", *PACKAGES) for clash in _clashes(name, found)]
    for clash in clashes:
        yield wrong("versions", clash, "install them together: pip install -U jax jaxlib flax optax orbax-checkpoint")
    plugins = list(_plugins(found["jaxlib"]))
    yield from plugins
    if missing or clashes or plugins:
        return
    names = [f"python {platform.python_version()}", *(f"{name} {found[name]}" for name in PACKAGES)]
    for cuda, parts in PLUGINS.items():
        if installed(parts[0]):
            names.append(f"CUDA {cuda} plug-in {installed(parts[0])}")
    yield ok("versions", ", ".join(names))


def installed(name: str) -> str:
    """Return the version of a package, or an empty text if it is not installed.

    The package is not imported: `name` is that of the distribution, such as `orbax-checkpoint`.
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _clashes(name: str, found: dict[str, str]) -> Iterator[str]:
    """Yield the requirements of a package that Python or the packages `found` do not meet."""
    from packaging.requirements import Requirement

    if not installed(name):
        return
    needed = metadata.metadata(name).json.get("requires_python")
    if not _fits(needed, platform.python_version()):
        yield f"{name} {installed(name)} needs Python {needed}, this is {platform.python_version()}"
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        version = found.get(requirement.name)
        if not version:
            continue
        # A marker limits a requirement to an extra, a platform or a version of Python.
        applies = not requirement.marker or requirement.marker.evaluate({"extra": ""})
        if applies and not _fits(str(requirement.specifier), version):
            need = f"{requirement.name} {requirement.specifier}"
            yield f"{name} {installed(name)} needs {need}, but {version} is installed"


def _fits(needed: str | list[str] | None, version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(str(needed or "")).contains(version, prereleases=True)


def _plugins(jaxlib: str) -> Iterator[Finding]:
    """Check that CUDA plug-ins are as old as jaxlib and complete, and that there is only one."""
    found = {name: installed(name) for parts in PLUGINS.values() for name in parts}
    for name, version in found.items():
        if version and version != jaxlib:
            yield wrong("versions", f"{name} is {version}, jaxlib {jaxlib}", f"pip install {name}=={jaxlib}")
    present = []
    for cuda, parts in PLUGINS.items():
        missing = [name for name in parts if not found[name]]
        if len(missing) == len(parts):
            continue
        present.append(cuda)
        for name in missing:
            yield wrong("versions", f"half of a CUDA plug-in: {name} is missing", f"pip install {name}=={jaxlib}")
    if len(present) == len(PLUGINS):
        yield wrong("versions", "the plug-ins for CUDA 12 and 13 are both installed", "uninstall those for one of them")


def xla_flags(here: Here) -> Iterator[Finding]:
    """Check XLA_FLAGS with XLA itself, in a child process: a flag that it does not know ends a process in C++."""
    flags = here.environment.get("XLA_FLAGS", "")
    if not flags.strip():
        yield ok("XLA_FLAGS", "none")
        return
    if not flags.lstrip().startswith("-"):
        yield _flags_file(flags)
        return
    words = flags.split()
    for word in words:
        if not word.startswith("--"):
            yield warning("XLA_FLAGS", f"'{word}' is no flag, and XLA ignores it", "write flags as --xla_name=value")
    if not refused(flags):
        yield ok("XLA_FLAGS", f"{counted(len(words), 'flag')}, all known")
        return
    # Each flag in a process of its own, to name those that XLA refuses.
    reasons = {word: refused(word) for word in dict.fromkeys(words)}
    bad = {word: reason for word, reason in reasons.items() if reason}
    for word, reason in bad.items():
        yield _bad_flag(word, reason)
    if bad:
        here.environment["XLA_FLAGS"] = " ".join(word for word in words if word not in bad)
    else:
        yield wrong("XLA_FLAGS", "XLA refuses these flags together, though none of them alone", "unset XLA_FLAGS")
        here.environment["XLA_FLAGS"] = ""


def _flags_file(flags: str) -> Finding:
    """Return the finding for a value of XLA_FLAGS that does not begin with a dash."""
    text = f"'{flags}' is read by XLA as the name of a file"
    if os.path.isfile(flags):
        return unchecked("XLA_FLAGS", text)
    return wrong("XLA_FLAGS", f"{text}, which does not exist: no flag counts", "write flags as --xla_name=value")


def _bad_flag(word: str, reason: str) -> Finding:
    """Return the finding for a flag that XLA refuses for `reason`."""
    name, _, value = word.removeprefix("--").partition("=")
    if "Unknown flag" not in reason:
        text = f"{name} cannot be '{value}': every process would end at its first use of XLA"
        return wrong("XLA_FLAGS", text, "correct the value; the checks below are made without it")
    near = difflib.get_close_matches(name, _known_flags(), n=1)
    hint = f"did you mean --{near[0]}? " if near else ""
    text = f"--{name} is unknown to jaxlib {installed('jaxlib')}: every process would end at its first use of XLA"
    return wrong("XLA_FLAGS", text, f"{hint}remove it; the checks below are made without it")


@functools.cache
def _known_flags() -> set[str]:
    """Return the names of XLA's flags, and some other names; empty if jaxlib's library is not found."""
    # XLA lists its flags nowhere, but their names stand in its compiled code.
    spec = importlib.util.find_spec("jaxlib")
    if not spec or not spec.submodule_search_locations:
        return set()
    library = Path(*spec.submodule_search_locations, "libjax_common.so")
    if not library.is_file():
        return set()
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {name.decode() for name in re.findall(rb"xla_[a-z0-9_]{4,80}(?=\0)", content)}


def refused(flags: str) -> str:
    """Return what XLA prints before it ends over such flags; empty if it accepts them."""
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", PARSE], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    if not done.returncode:
        return ""
    return done.stderr or f"exit code {done.returncode}"


def options(here: Here) -> Iterator[Finding]:
    """Report the compiler options of a step on several GPUs. Needs JAX."""
    from jaxdist.cluster import xla_options

    across = xla_options.as_flags(xla_options.options("gpu", 2, across=True))
    if xla_options.series() in xla_options.OPTIONS:
        text = "a step on several GPUs is compiled with no options"
        if across:
            text += f"; data across hosts, with {across}"
        yield ok("compiler", text)
        return
    text = f"no options are known for jaxlib {installed('jaxlib')}; how much its defaults overlap is not known either"
    if here.gpus:
        yield warning("compiler", text, "use jax " + ", ".join(xla_options.OPTIONS))
    else:
        yield ok("compiler", text)


def memory(here: Here) -> Iterator[Finding]:
    """Check the settings for the share of a GPU's memory that JAX takes."""
    environment = here.environment
    found = []
    fractions = {name: environment[name] for name in FRACTIONS if environment.get(name)}
    if len(fractions) == 2:
        text = f"{FRACTIONS[0]} and {FRACTIONS[1]} are both set, over which JAX ends"
        found.append(wrong("memory", text, f"unset {FRACTIONS[1]}, the old name"))
        del environment[FRACTIONS[1]]
    for name, value in fractions.items():
        if not 0 < _number(value) <= 1:
            found.append(wrong("memory", f"{name} is '{value}'", "set it to a part of the memory, such as 0.9"))
            environment.pop(name, None)
    if fractions and not preallocates(environment):
        preallocate = environment["XLA_PYTHON_CLIENT_PREALLOCATE"]
        text = (
            f"{next(iter(fractions))} is only a bound where XLA_PYTHON_CLIENT_PREALLOCATE is {preallocate}: memory is "
            "taken piece by piece, and fragmentation wastes more of it"
        )
        found.append(warning("memory", text, "set one of them"))
    allocator = environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator not in ALLOCATORS:
        text = f"XLA_PYTHON_CLIENT_ALLOCATOR is '{allocator}', over which JAX ends"
        found.append(wrong("memory", text, f"valid are {', '.join(ALLOCATORS)}"))
        del environment["XLA_PYTHON_CLIENT_ALLOCATOR"]
    elif allocator == "platform":
        text = "XLA_PYTHON_CLIENT_ALLOCATOR is platform: every array is allocated separately, which is slow"
        found.append(warning("memory", text, "unset it, except to look for a leak"))
    yield from found
    if not found:
        yield ok("memory", f"JAX takes {fraction(here):g} of a GPU's memory, if there is one")


def fraction(here: Here) -> float:
    """Return the share of a GPU's memory that this process takes at its start."""
    if not preallocates(here.environment):
        return 0.0
    for name in FRACTIONS:
        if here.environment.get(name):
            return _number(here.environment[name])
    return GPU_SHARE


def _number(text: str) -> float:
    """Parse a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
