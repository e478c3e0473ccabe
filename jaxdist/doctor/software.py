"""Checks of what is installed and set, before JAX is imported: what would kill it is told, and then left out."""

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
from jaxdist.gpu_memory import FRACTIONS, GPU_SHARE

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")

PLUGINS = {cuda: (f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt") for cuda in (12, 13)}
"""What lets JAX use NVIDIA's GPUs, by the version of CUDA. Each comes in two parts."""

PARSE = "from jaxlib import xla_client; xla_client.CompileOptions()"
"""The least that reads XLA_FLAGS."""

ALLOCATORS = ("default", "platform", "bfc", "cuda_async", "vmm", "address")


def versions(here: Here) -> Iterator[Finding]:
    """Python, JAX and what stands on it: installed, and such as each says that it needs the others."""
    found = {name: installed(name) for name in PACKAGES}
    for name in (name for name in PACKAGES if not found[name]):
        yield wrong("versions", f"{name} is not installed", f"{sys.executable} -m pip install {name}")
    clashes = [clash for name in ("jaxdist", *PACKAGES) for clash in _clashes(name, found)]
    for clash in clashes:
        yield wrong("versions", clash, "install them together: pip install -U jax jaxlib flax optax orbax-checkpoint")
    plugins = list(_plugins(found["jaxlib"]))
    yield from plugins
    if all(found.values()) and not clashes and not plugins:
        cuda = [f"CUDA {one} plug-in {installed(parts[0])}" for one, parts in PLUGINS.items() if installed(parts[0])]
        names = [f"python {platform.python_version()}", *(f"{name} {found[name]}" for name in PACKAGES), *cuda]
        yield ok("versions", ", ".join(names))


def installed(name: str) -> str:
    """The version of a package, empty without it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _clashes(name: str, found: dict[str, str]) -> Iterator[str]:
    from packaging.requirements import Requirement

    if not installed(name):
        return
    if not _fits(metadata.metadata(name).get("Requires-Python"), platform.python_version()):
        needed = metadata.metadata(name)["Requires-Python"]
        yield f"{name} {installed(name)} needs Python {needed}, this is {platform.python_version()}"
    for text in metadata.requires(name) or ():
        need = Requirement(text)
        there = found.get(need.name)
        if there and (not need.marker or need.marker.evaluate({"extra": ""})) and not _fits(str(need.specifier), there):
            yield f"{name} {installed(name)} needs {need.name} {need.specifier}, but {there} is installed"


def _fits(needed: str | None, version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(needed or "").contains(version, prereleases=True)


def _plugins(jaxlib: str) -> Iterator[Finding]:
    there = {name: version for parts in PLUGINS.values() for name in parts if (version := installed(name))}
    for name, version in there.items():
        if version != jaxlib:
            yield wrong("versions", f"{name} is {version}, jaxlib {jaxlib}", f"pip install {name}=={jaxlib}")
    halves = [name for parts in PLUGINS.values() if 0 < sum(part in there for part in parts) < 2 for name in parts]
    for name in halves:
        if name not in there:
            yield wrong("versions", f"half of a CUDA plug-in: {name} is missing", f"pip install {name}=={jaxlib}")
    if all(any(part in there for part in parts) for parts in PLUGINS.values()):
        yield wrong("versions", "the plug-ins for CUDA 12 and 13 are both installed", "uninstall those for one of them")


def xla_flags(here: Here) -> Iterator[Finding]:
    """XLA_FLAGS as XLA itself reads them, in a child: a flag that it does not know ends a process in C++."""
    flags = here.environment.get("XLA_FLAGS", "")
    if not flags.strip():
        yield ok("XLA_FLAGS", "none")
        return
    if not flags.lstrip().startswith("-"):
        exists = os.path.isfile(flags)
        note = "is read by XLA as the name of a file" + ("" if exists else ", which does not exist: no flag counts")
        tell = unchecked("XLA_FLAGS", f"'{flags}' {note}") if exists else None
        yield tell or wrong("XLA_FLAGS", f"'{flags}' {note}", "write flags as --xla_name=value")
        return
    words = flags.split()
    for word in (word for word in words if not word.startswith("--")):
        yield warning("XLA_FLAGS", f"'{word}' is no flag, and XLA ignores it", "write flags as --xla_name=value")
    if not refused(flags):
        yield ok("XLA_FLAGS", f"{len(words)} flag(s), all known")
        return
    bad = {word: why for word in dict.fromkeys(words) if (why := refused(word))}
    for word, why in bad.items():
        yield _bad_flag(word, why)
    if not bad:
        yield wrong("XLA_FLAGS", "XLA refuses these flags together, though none of them alone", "unset XLA_FLAGS")
    here.environment["XLA_FLAGS"] = " ".join(word for word in words if word not in bad) if bad else ""


def _bad_flag(word: str, why: str) -> Finding:
    name, _, value = word.removeprefix("--").partition("=")
    if "Unknown flag" not in why:
        said = f"{name} cannot be '{value}': every process would end at its first use of XLA"
        return wrong("XLA_FLAGS", said, "correct the value; the checks below are made without it")
    near = difflib.get_close_matches(name, _known_flags(), n=1)
    hint = f"did you mean --{near[0]}? " if near else ""
    said = f"--{name} is unknown to jaxlib {installed('jaxlib')}: every process would end at its first use of XLA"
    return wrong("XLA_FLAGS", said, f"{hint}take it out; the checks below are made without it")


@functools.cache
def _known_flags() -> set[str]:
    """Names of flags, and some more: XLA tells them nowhere but in its own code. Empty where that is not found."""
    spec = importlib.util.find_spec("jaxlib")
    code = Path(*spec.submodule_search_locations, "libjax_common.so") if spec else Path()
    if not code.is_file():
        return set()
    with code.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return {name.decode() for name in re.findall(rb"xla_[a-z0-9_]{4,80}(?=\0)", content)}


def refused(flags: str) -> str:
    """What XLA says before it ends over such flags; empty if it takes them."""
    environment = {**os.environ, "XLA_FLAGS": flags}
    done = subprocess.run(
        [sys.executable, "-c", PARSE], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    return (done.stderr or f"exit code {done.returncode}") if done.returncode else ""


def options(here: Here) -> Iterator[Finding]:
    """What a step on several GPUs is compiled with. Needs JAX."""
    from jaxdist.cluster import xla_options

    within, across = (
        xla_options.as_flags(xla_options.options("gpu", 2, across)) or "no options" for across in (False, True)
    )
    if xla_options.series() in xla_options.OPTIONS:
        yield ok("compiler", f"a step on several GPUs is compiled with {within}; data across hosts, with {across}")
        return
    said = f"no options are known for jaxlib {installed('jaxlib')}, and XLA by itself lets little run beside products"
    tell = "use jax " + ", ".join(xla_options.OPTIONS)
    yield warning("compiler", said, tell) if here.gpus else ok("compiler", said)


def memory(here: Here) -> Iterator[Finding]:
    """What is said of the part of a GPU's memory that JAX takes."""
    told = {name: here.environment[name] for name in FRACTIONS if here.environment.get(name)}
    found = []
    if len(told) == 2:
        said = f"{FRACTIONS[0]} and {FRACTIONS[1]} are both set, over which JAX ends"
        found.append(wrong("memory", said, f"unset {FRACTIONS[1]}, the old name"))
        del here.environment[FRACTIONS[1]]
    for name, text in told.items():
        if not 0 < _number(text) <= 1:
            found.append(wrong("memory", f"{name} is '{text}'", "set it to a part of the memory, such as 0.9"))
            here.environment.pop(name, None)
    given = here.environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "")
    if told and given in ("false", "False", "0"):
        said = (
            f"{next(iter(told))} is only a bound where XLA_PYTHON_CLIENT_PREALLOCATE is {given}: memory is taken bit "
        )
        found.append(warning("memory", said + "by bit, and more of it is lost between the pieces", "set one of them"))
    allocator = here.environment.get("XLA_PYTHON_CLIENT_ALLOCATOR", "default").lower()
    if allocator not in ALLOCATORS:
        valid = ", ".join(ALLOCATORS)
        said = f"XLA_PYTHON_CLIENT_ALLOCATOR is '{allocator}', over which JAX ends"
        found.append(wrong("memory", said, f"valid are {valid}"))
        del here.environment["XLA_PYTHON_CLIENT_ALLOCATOR"]
    elif allocator == "platform":
        said = "XLA_PYTHON_CLIENT_ALLOCATOR is platform: every array is allocated for itself, which is slow"
        found.append(warning("memory", said, "unset it but to look for a leak"))
    yield from found
    if not found:
        yield ok("memory", f"JAX takes {fraction(here):g} of a GPU's memory, if there is one")


def fraction(here: Here) -> float:
    """The part of a GPU's memory that this process takes at once."""
    if here.environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") in ("false", "False", "0"):
        return 0.0
    given = next((here.environment[name] for name in FRACTIONS if here.environment.get(name)), str(GPU_SHARE))
    return _number(given)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
