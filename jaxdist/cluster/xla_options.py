"""What a run on GPUs asks of XLA, and one on a CPU does not: how its step is compiled, how much of a GPU's memory is
taken, and where compiled programs are kept. What the user has set is left as it is.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import jax
from jax._src import xla_bridge

from jaxdist.cluster import gpus, kv_store
from jaxdist.cluster.preflight import sees, sign_of
from jaxdist.cluster.rendezvous import across_hosts, host_names
from jaxdist.gpu_memory import FRACTIONS, GPU_SHARE, gpu_share, preallocates


@dataclass(frozen=True)
class Option:
    """Of the compilation of a step for several GPUs: what XLA would do otherwise."""

    name: str
    reason: str
    """What it does to the schedule of Llama 8B with ZeRO 3 on H100s, of which a device sends 50.6 GiB in a step on 8,
    and 57.0 on 64: benchmarks/results/2026-11-23-flags-target.txt."""
    value: bool | str = True
    also: str = ""
    """Another name of the same in XLA_FLAGS."""


MODE = "COLLECTIVE_PIPELINING_MODE_"
"""Before the values of options that were true or false once; XLA_FLAGS have these without it, in small letters."""

NO_SCATTER = Option(
    "xla_gpu_enable_pipelined_reduce_scatter",
    "left as it comes, each layer's gradients wait for the next turn of the loop to be reduced, and are copied for "
    "that: on 8, nothing recomputed, copies and transposes are 9.1 % of all bytes with 0.10.2 and 5.4 % with 0.12.0.1, "
    "without it 0.0 and 1.4 %; and less runs beside nothing, 1.7 GiB in place of 2.0 and 2.6 in place of 2.9",
    False,
    also="xla_gpu_pipeline_reduce_scatter",
)
NO_SCATTER_NOW = replace(NO_SCATTER, name=NO_SCATTER.also, value=f"{MODE}OFF", also=NO_SCATTER.name)
GATHER = Option(
    "xla_gpu_pipeline_all_gather",
    "a layer is gathered while the one before it computes: on 64, 47.6 GiB in place of 20.7 run beside matrix products "
    "and 0.8 in place of 6.8 beside nothing (0.12.0.1); the price is 22 % copies, more than it saves within a host",
    f"{MODE}ON",
    also="xla_gpu_enable_pipelined_all_gather",
)


class Choice(NamedTuple):
    """Of options, three at most, by where the data axis goes. NVLink carries a byte in the time in which a GPU's memory
    copies seven; a network is nine times slower, and what can run beside products is then worth its copies."""

    within: tuple[Option, ...]
    """Inside hosts."""
    across: tuple[Option, ...]
    """From host to host."""


OPTIONS = {
    "0.10": Choice((NO_SCATTER,), ()),
    "0.11": Choice((NO_SCATTER_NOW,), (GATHER,)),
    "0.12": Choice((NO_SCATTER_NOW,), (GATHER,)),
}
"""By series of jaxlib: one that is not here gets none, because a name that it does not know would end the compilation.
For one GPU there are none: nothing could be measured on one."""


def series() -> str:
    """Of jaxlib: `0.10`."""
    return ".".join(version("jaxlib").split(".")[:2])


def options(platform: str, devices: int, across: bool, sequence: bool = False) -> dict[str, bool | str]:
    """For `jax.jit(compiler_options=...)` of a step over so many devices, its data axis `across` hosts or within them;
    those that XLA_FLAGS names are left to it.

    Across hosts none with `sequence` parallelism: XLA would gather a layer's activations ahead too, and make their
    products again: 2,840 of them in place of 1,944 for Llama 8B on 128 H100s, and 750 GiB read and written in place of
    542 (0.11.2).
    """
    if devices == 1 or platform == "cpu" or (across and sequence):
        return {}
    chosen, own = OPTIONS.get(series(), Choice((), ())), named(os.environ.get("XLA_FLAGS", ""))
    asked = chosen.across if across else chosen.within
    return {one.name: one.value for one in asked if not own & {one.name, one.also}}


def options_for(mesh: jax.sharding.Mesh, sequence: bool) -> dict[str, bool | str]:
    """`options` for the devices of a mesh, there or not. All processes call it."""
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        return {}
    return options(platform, mesh.size, across_hosts(mesh, host_names(mesh.devices.flat)), sequence)


def as_flags(asked: dict[str, bool | str]) -> str:
    """Options as XLA_FLAGS have them, without the dashes; empty where there are none."""
    return ", ".join(f"{name}={str(value).removeprefix(MODE).lower()}" for name, value in asked.items())


def named(flags: str) -> set[str]:
    """The names in a text like XLA_FLAGS, which may be the name of a file that holds it."""
    if flags and not flags.lstrip().startswith("-"):
        with suppress(OSError):
            flags = Path(flags).read_text()
    return set(re.findall(r"--(\w+)", flags))


def take_memory() -> None:
    """Let JAX take `GPU_SHARE` of each GPU, where neither the user nor a backend that has started decides that."""
    decided = any(os.environ.get(name) for name in FRACTIONS) or not preallocates()
    if gpus.visible() and not decided and not xla_bridge.backends_are_initialized():
        os.environ[FRACTIONS[0]] = f"{GPU_SHARE:g}"


def keep_programs(folder: Path, say: Callable[[str], None]) -> None:
    """Keep compiled programs in `folder`, this user's alone, and with them what XLA found out about kernels.

    All processes of a job call it, before they ask for devices. JAX lets process 0 alone write there, and the others
    must find the same: where one reads a program that another compiles, that one waits for all to share the tuning.
    """
    if not gpus.visible() or _programs_are_set():
        return
    if not (problem := _problem(folder)):
        jax.config.update("jax_compilation_cache_dir", str(folder))
    elif kv_store.process() == 0:
        say(f"note: compiled programs are not kept: {folder} {problem}")


def _programs_are_set() -> bool:
    """Whether the user has: no folder is a decision too."""
    asked = "JAX_COMPILATION_CACHE_DIR" in os.environ or jax.config.jax_compilation_cache_dir
    return bool(asked) or not jax.config.jax_enable_compilation_cache


def not_private(folder: Path) -> str:
    """Make `folder`; what is wrong with it for programs that this user will run. Empty where nothing is."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        named, there = folder.lstat(), folder.stat()  # a link that somebody else made leads where they like
    except OSError as error:
        return f"cannot be made ({os.strerror(error.errno or 0).lower()})"
    if {named.st_uid, there.st_uid} != {os.getuid()} or there.st_mode & 0o022:
        return "is another user's, or may be written by others, who could run programs as you"
    return ""


def _problem(folder: Path) -> str:
    """What is wrong with `folder` in one of the processes, the same text in all: not private, or not written by process
    0, or another folder than its. Empty where nothing is."""
    sign = sign_of(folder, secrets.randbelow(2**31))
    own = not_private(folder) or (_not_written(sign) if kv_store.process() == 0 else "")
    try:
        signed = kv_store.gather("programs", sign.name)[0]
        own = own or ("" if sees(folder / signed) else "is not the same folder on all hosts")
        problems = kv_store.gather("programs seen", own)
    except TimeoutError:
        problems = [None]
    finally:
        with suppress(OSError):
            sign.unlink(missing_ok=True)
    return next((problem or "was not seen by all processes in time" for problem in problems if problem != ""), "")


def _not_written(file: Path) -> str:
    try:
        file.write_text("seen\n")
    except OSError as error:
        return f"cannot be written ({os.strerror(error.errno or 0).lower()})"
    return ""


def settings(platform: str, asked: dict[str, bool | str]) -> dict[str, object]:
    """What is asked of XLA for a run with these options, whoever asks; in the run's `environment.json`."""
    return {
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "compiler_options": asked,
        "memory_fraction": None if platform == "cpu" else gpu_share(),
        "compilation_cache": jax.config.jax_compilation_cache_dir,
    }


def summary_line(platform: str, asked: dict[str, bool | str]) -> str:
    """The same for a person; empty on a CPU, of which nothing is asked."""
    found = settings(platform, asked)
    if found["memory_fraction"] is None:
        return ""
    names = as_flags(asked) or "no options"
    kept = f"programs kept in {found['compilation_cache']}" if found["compilation_cache"] else "programs not kept"
    return f"{names}; JAX takes {found['memory_fraction']:.0%} of a GPU's memory; {kept}"
