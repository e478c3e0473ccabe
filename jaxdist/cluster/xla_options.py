"""Options that a run sets for XLA: compilation of the step, share of a GPU's memory, compilation cache.

All but `options_for_init` and the cache are for GPUs. Settings of the user are left as they are.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge

from jaxdist.cluster import gpus, kv_store
from jaxdist.cluster.preflight import is_visible, marker_path
from jaxdist.cluster.rendezvous import across_hosts, host_names
from jaxdist.files.caches import cpu_programs_folder, programs_folder
from jaxdist.process.gpu_memory import FRACTIONS, GPU_SHARE, gpu_share, preallocates


@dataclass(frozen=True)
class Option:
    """An option for compiling the step for several GPUs that differs from XLA's default."""

    name: str
    reason: str
    """What it does to a step."""
    value: bool | str | int = True
    also: str = ""
    """Another name of the same option in XLA_FLAGS."""


MODE = "COLLECTIVE_PIPELINING_MODE_"
"""Prefix of the values of options that used to be boolean; XLA_FLAGS spells them without it, in lower case."""

GATHER = Option(
    "xla_gpu_pipeline_all_gather",
    "a layer is gathered while the one before it computes: Llama 8B with ZeRO 3 takes 898 ms on 64 H100s, not 964, "
    "of which 64 instead of 171 are exposed communication, and 47 instead of 6 copies (0.12.0.1; 917, not 965, with "
    "0.11.2). Inside a host the copies cost more than is saved",
    f"{MODE}ON",
    also="xla_gpu_enable_pipelined_all_gather",
)
OVERLAP = Option(
    "xla_gpu_experimental_parallel_collective_overlap_limit",
    "so many collectives may be under way at once, of which delayed gradients that cross the replicas are one: with "
    "XLA's default of 1, a loop that gathers layers is never put beside them "
    "(benchmarks/results/2026-11-25-delayed-gradients.txt). Keys and values of a ring are others, which would travel "
    "one after the other, with nothing beside the first: of what Llama 8B sends over context=4 at 32k tokens, 6.0 of "
    "15.0 GiB would be exposed, and nothing is with this option (benchmarks/context.md)",
    4,
)
"""Of steps that send several things at once (`Split.sends_several`) alone."""
DETERMINISTIC = Option(
    "xla_gpu_exclude_nondeterministic_ops",
    "sums of the embedding's gradient without atomic additions, and cuDNN's deterministic backward pass of flash "
    "attention. Kernels are still chosen by measuring, which `xla_gpu_deterministic_ops` would end",
    also="xla_gpu_deterministic_ops",
)
"""Of runs that ask for it (`train.deterministic`) alone, also on one GPU and with every jaxlib."""
FLOAT8 = Option(
    "xla_gpu_enable_triton_gemm",
    "matmuls in fp8 become calls of cuBLASLt, for which XLA has a pattern. Kernels of Triton would take them first, "
    "and XLA drop the conversions to fp8: in a program that is compiled without a GPU, all matmuls are in "
    "bfloat16 then (benchmarks/results/2026-11-29-fp8-target.txt)",
    False,
)
"""Of runs in fp8 alone, also on one GPU and with every jaxlib."""


OPTIONS: dict[str, tuple[Option, ...]] = {"0.10": (), "0.11": (GATHER,), "0.12": (GATHER,)}
"""Options by series of jaxlib, three at most, of steps in which an axis of ZeRO spans hosts.

Inside a host all get none. By the time that is modelled from the program of Llama 8B with ZeRO 3 for 8 H100s, XLA's
defaults take 856 ms with 0.10.2, 838 with 0.11.2 and 824 with 0.12.0.1. Layers that are gathered ahead take 846, 845
and 845: with 0.11 and 0.12 their copies cost more than they save, and with 0.10 Llama 1B takes longer (483 ms, not 481)
and needs 1.1 GiB more. Reductions that stay in their turn of the loop, as jaxdist asked for once, take 876 with 0.10
and 0.12. Across 8 hosts 0.10 takes 903 ms by default and 920 with layers gathered ahead. All numbers:
benchmarks/results/2026-11-29-flags-target.txt and 2026-11-30-flags-target.txt.

Other series get none, because a name that jaxlib does not know would end the compilation. One GPU gets none either:
docs/status.md says what was measured.
"""


def series() -> str:
    """Return the series of jaxlib: `0.10`."""
    return ".".join(version("jaxlib").split(".")[:2])


def options(
    platform: str,
    devices: int,
    across: bool,
    sequence: bool = False,
    several: bool = False,
    deterministic: bool = False,
    float8: bool = False,
) -> dict[str, bool | str | int]:
    """Return `jax.jit(compiler_options=...)` of a step on `devices` devices; options in XLA_FLAGS are left out.

    `several` says whether the step may have several collectives under way at once, for which there is an option of its
    own. `across` says whether an axis over which ZeRO shards spans hosts, which has options unless there is `sequence`
    parallelism: XLA would also gather a layer's activations ahead, and repeat their matmuls: 2,840 of them instead of
    1,944 for Llama 8B on 128 H100s, and 750 GiB of memory traffic instead of 542 (0.11.2). `deterministic` says whether
    each run of the program is to compute the same bits, `float8` whether matmuls are in fp8.
    """
    if platform == "cpu":
        return {}
    chosen: tuple[Option, ...] = ()
    if devices > 1 and series() in OPTIONS:
        if across and not sequence:
            chosen = OPTIONS[series()]
        if several:
            chosen = (*chosen, OVERLAP)
    if deterministic:
        chosen = (*chosen, DETERMINISTIC)
    if float8:
        chosen = (*chosen, FLOAT8)
    set_by_user = names_in(os.environ.get("XLA_FLAGS", ""))
    return {option.name: option.value for option in chosen if not set_by_user & {option.name, option.also}}


def options_for(
    mesh: jax.sharding.Mesh, sequence: bool, several: bool = False, deterministic: bool = False, float8: bool = False
) -> dict[str, bool | str | int]:
    """Return `options` for the devices of a mesh, which may be abstract. All processes call it."""
    platform = mesh.devices.flat[0].platform
    if platform == "cpu":
        return {}
    across = across_hosts(mesh, host_names(mesh.devices.flat))
    return options(platform, mesh.size, across, sequence, several, deterministic, float8)


def options_for_init(platform: str) -> dict[str, int]:
    """Return `jax.jit(compiler_options=...)` of the program that makes the initial state.

    On a CPU it runs once, for less time than its many small loops take to compile: with little optimization, that of
    gpt_tiny compiles in 2.3 s instead of 5.4 s, and makes the same numbers in the same time.
    """
    name = "xla_backend_optimization_level"
    if platform != "cpu" or name in names_in(os.environ.get("XLA_FLAGS", "")):
        return {}
    return {name: 1}


def as_flags(chosen: dict[str, bool | str | int]) -> str:
    """Return options as XLA_FLAGS spells them, without the dashes; empty if there are none."""
    return ", ".join(f"{name}={str(value).removeprefix(MODE).lower()}" for name, value in chosen.items())


def names_in(flags: str) -> set[str]:
    """Return the names in the value of XLA_FLAGS, which may be the name of a file with the flags."""
    if flags and not flags.lstrip().startswith("-"):
        with suppress(OSError):
            flags = Path(flags).read_text()
    return set(re.findall(r"--(\w+)", flags))


def take_memory() -> None:
    """Let JAX take `GPU_SHARE` of each GPU, unless the user or a backend that has started has decided that.

    It sets an environment variable, which JAX reads when its backend starts.
    """
    decided = any(os.environ.get(name) for name in FRACTIONS) or not preallocates()
    if gpus.visible() and not decided and not xla_bridge.backends_are_initialized():
        os.environ[FRACTIONS[0]] = f"{GPU_SHARE:g}"


def keep_programs(devices: int, say: Callable[[str], None]) -> None:
    """Use a folder of jaxdist's cache as the compilation cache; on GPUs it also keeps what XLA's autotuning found.

    All processes of a job call it, before they ask for devices. Without GPUs the mesh will take so many `devices`.
    `say` prints a note if the folder cannot be used.
    """
    # JAX lets only process 0 write to the cache, and the others must find the same there: a process that compiles a
    # program waits for all others to share the autotuning, also for one that has read the program instead.
    if _cache_is_set():
        return
    if gpus.visible():
        folder = programs_folder()
    elif _kept_for_cpus(devices):
        folder = cpu_programs_folder(len(os.sched_getaffinity(0)))
    else:
        return
    problem = _problem(folder)
    if not problem:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        if not gpus.visible() and LEAST_SECONDS not in os.environ:
            jax.config.update(LEAST_SECONDS.lower(), 0.1)
    elif kv_store.process() == 0:
        say(f"note: compiled programs are not kept: {folder} {problem}")


LEAST_SECONDS = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
"""The variable that says from how many seconds on JAX keeps what it has compiled: 1, but for a run on CPUs."""


def _kept_for_cpus(devices: int) -> bool:
    """Return whether programs for so many CPU devices are kept here.

    In a program that it has read, XLA:CPU has forgotten the order of its collectives (seen with jaxlib 0.10.2 and
    0.12.0.1): two devices may begin with different ones, and wait for each other for ever. Of several processes only
    the first would find what it has kept: JAX writes there alone, and its names for the programs of the others differ.
    On macOS XLA may die of a program that it reads, and with a jaxlib of another series refuse it at each start (jax
    issue 38445).
    """
    return sys.platform == "linux" and devices == kv_store.processes() == 1 and series() in OPTIONS


def _cache_is_set() -> bool:
    """Return whether the user has decided about the cache: an empty folder name is a decision too."""
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return True
    if jax_option("jax_compilation_cache_dir"):
        return True
    return not jax_option("jax_enable_compilation_cache")


def jax_option(name: str) -> Any:
    """Return the value of an option of JAX. Its older versions add them as attributes at run time."""
    return getattr(jax.config, name)


def not_private(folder: Path) -> str:
    """Make `folder`, and return what is wrong with it for programs that this user will run; empty if nothing is."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Both, because a link that somebody else made leads where they like.
        named = folder.lstat()
        target = folder.stat()
    except OSError as error:
        return f"cannot be made ({os.strerror(error.errno or 0).lower()})"
    if {named.st_uid, target.st_uid} != {os.getuid()} or target.st_mode & 0o022:
        return "is another user's, or may be written by others, who could run programs as you"
    return ""


def _problem(folder: Path) -> str:
    """Return what is wrong with `folder` in one of the processes; empty if nothing is. The same in all of them.

    The folder must be private and the same in all processes, and process 0 must be able to write there.
    """
    marker = marker_path(folder, secrets.randbelow(2**31))
    own = not_private(folder)
    if not own and kv_store.process() == 0:
        own = _write(marker)
    try:
        name = kv_store.gather("programs", marker.name)[0]
        if not own and not is_visible(folder / name):
            own = "is not the same folder on all hosts"
        problems = kv_store.gather("programs seen", own)
    except TimeoutError:
        problems = [None]
    finally:
        with suppress(OSError):
            marker.unlink(missing_ok=True)
    for problem in problems:
        if problem != "":
            # None stands for a process that did not answer.
            return problem or "was not seen by all processes in time"
    return ""


def _write(file: Path) -> str:
    """Write a marker file, and return why it cannot be written; empty if it can."""
    try:
        file.write_text("seen\n")
    except OSError as error:
        return f"cannot be written ({os.strerror(error.errno or 0).lower()})"
    return ""


def settings(platform: str, chosen: dict[str, bool | str | int]) -> dict[str, object]:
    """Return what jaxdist or the user has set for XLA in a run with these options, for `environment.json`."""
    memory_fraction = None
    if platform != "cpu":
        memory_fraction = gpu_share()
    return {
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "compiler_options": chosen,
        "memory_fraction": memory_fraction,
        "compilation_cache": jax_option("jax_compilation_cache_dir"),
    }


def summary_line(platform: str, chosen: dict[str, bool | str | int]) -> str:
    """Return `settings` as a line for people; empty on a CPU, where nothing is set."""
    found = settings(platform, chosen)
    if found["memory_fraction"] is None:
        return ""
    names = as_flags(chosen) or "no options"
    kept = "programs not kept"
    if found["compilation_cache"]:
        kept = f"programs kept in {found['compilation_cache']}"
    return f"{names}; JAX takes {found['memory_fraction']:.0%} of a GPU's memory; {kept}"
