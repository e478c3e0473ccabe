"""Checks of the machine before JAX is imported: GPU driver, limits, folders of the caches."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxdist.doctor.findings import Finding, Here, ok, unchecked, warning, wrong
from jaxdist.doctor.software import PLUGINS, installed
from jaxdist.output.units import counted

LEAST_DRIVER = {12: 525, 13: 580}
"""Major version of NVIDIA's driver that each version of CUDA needs, from JAX's installation guide."""

OPEN_FILES = 256
"""Files that a run itself has open at a time."""

OPEN_FILES_PER_PROCESS = 16
"""Files that a run has open for each process that it talks to."""

CACHE_BYTES = 500_000_000
"""Free bytes that a cache should have."""

SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm that NCCL should have between processes of one host; Docker gives 64 MiB."""


def driver(here: Here, root: Path = Path("/")) -> Iterator[Finding]:
    """Check NVIDIA's driver and its GPUs, without JAX; `root` is where /proc and /dev lie."""
    rows, problem = _query_smi()
    names = [row[0] for row in rows]
    version = rows[0][1] if rows else ""
    here.buses = tuple(row[2] for row in rows)
    proc = root / "proc/driver/nvidia"
    devices = list((root / "dev").glob("nvidia[0-9]*"))
    # A container may have the devices without nvidia-smi.
    here.gpus = len(names) or len(list((proc / "gpus").glob("*"))) or len(devices)
    if problem:
        remedy = "let the administrator repair the driver; a restart helps after an update"
        yield wrong("driver", problem, remedy, of_node=True)
    elif devices and not names and not (proc / "version").exists():
        text = f"{counted(len(devices), 'device')} /dev/nvidia*, but neither nvidia-smi nor /proc/driver/nvidia"
        yield wrong("driver", text, "give the container NVIDIA's driver (--nv, --gpus all), or load its kernel module")
    elif not here.gpus:
        yield ok("driver", "no NVIDIA GPU: neither nvidia-smi nor /proc/driver/nvidia shows one")
    else:
        yield from _check_gpus(here, names, version)


def _query_smi() -> tuple[list[list[str]], str]:
    """Return [name, driver version, PCI address] of each GPU, and what is wrong, from nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return [], ""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,pci.bus_id", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer ({error})"
    lines = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    if done.returncode:
        reason = lines[0] if lines else f"exit code {done.returncode}"
        return [], f"nvidia-smi fails: {reason}"
    # A line without the three values is no GPU.
    return [[part.strip() for part in line.split(",")] for line in lines if line.count(",") == 2], ""


def _check_gpus(here: Here, names: Sequence[str], version: str) -> Iterator[Finding]:
    """Check that JAX can use the GPUs with this version of the driver."""
    found = []
    visible = here.environment.get("CUDA_VISIBLE_DEVICES")
    numbers = [int(one) for one in (visible or "").split(",") if one.strip().isdecimal()]
    absent = [number for number in numbers if number >= here.gpus]
    if absent:
        text = (
            f"CUDA_VISIBLE_DEVICES is {visible}, but GPU {absent[0]} is none of the {here.gpus} here (from 0): "
            "CUDA hides it and those after it"
        )
        found.append(wrong("driver", text, "correct or unset it"))
    plugins = [cuda for cuda, parts in PLUGINS.items() if installed(parts[0])]
    if not plugins:
        text = f"{counted(here.gpus, 'GPU')}, but JAX's CUDA plug-in is not installed: JAX would use the CPU"
        found.append(wrong("driver", text, "pip install 'jaxdist[gpu]' (CUDA 12) or 'jaxdist[gpu13]' (CUDA 13)"))
    major = version.partition(".")[0]
    for cuda in plugins:
        if major.isdecimal() and int(major) < LEAST_DRIVER[cuda]:
            text = f"driver {version} is too old for CUDA {cuda}, which needs {LEAST_DRIVER[cuda]}"
            remedy = "update the driver"
            if cuda == 13 and int(major) >= LEAST_DRIVER[12]:
                remedy += " or install 'jaxdist[gpu]' (CUDA 12)"
            found.append(wrong("driver", text, remedy, of_node=True))
    if found:
        yield from found
        return
    kinds = ", ".join(dict.fromkeys(names)) or "NVIDIA"
    yield ok("driver", f"{here.gpus} x {kinds}, driver {version or 'of unknown version'}")


def limits(here: Here, root: Path = Path("/")) -> Iterator[Finding]:
    """Check open files, locked memory for InfiniBand, and shared memory for NCCL."""
    found = []
    processes = here.env.processes
    needed = OPEN_FILES + OPEN_FILES_PER_PROCESS * processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        text = f"at most {soft} open files; {counted(processes, 'process')} need about {needed}"
        found.append(wrong("limits", text, _raise_open_files(needed, hard), of_node=True))
    # InfiniBand pins the memory that it reads and writes.
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = list((root / "sys/class/infiniband").glob("*"))
    if cards and locked != resource.RLIM_INFINITY:
        text = f"at most {locked:,} bytes of locked memory, but InfiniBand ({cards[0].name}) needs more"
        remedy = "ulimit -l unlimited; under Slurm PropagateResourceLimitsExcept=MEMLOCK"
        found.append(wrong("limits", text, remedy, of_node=True))
    if here.gpus > 1:
        shared = shutil.disk_usage(root / "dev/shm").total
        if shared < SHARED_MEMORY:
            text = f"/dev/shm has {shared / 2**20:.0f} MiB, which may be too little for NCCL"
            found.append(warning("limits", text, "give the container --shm-size=8g or --ipc=host"))
    if found:
        yield from found
    elif soft < 0:
        yield ok("limits", "any number of open files")
    else:
        yield ok("limits", f"{soft} open files")


def _raise_open_files(needed: int, hard: int) -> str:
    """Return how to allow `needed` open files; `hard` is the hard limit."""
    wanted = max(needed, 4096)
    if hard == resource.RLIM_INFINITY:
        return f"ulimit -n {wanted}"
    if hard >= needed:
        return f"ulimit -n {min(hard, wanted)}"
    return "ask the administrator for more"


def caches(here: Here) -> Iterator[Finding]:
    """Check the folder of tokens, and that of compiled programs."""
    # Imported here, because it imports xxhash, which has to be found first.
    from jaxdist.files.caches import cache_folder, programs_folder

    yield _check_folder(cache_folder(), "cache", "set JAXDIST_CACHE to a folder of yours with room")
    programs = here.environment.get("JAX_COMPILATION_CACHE_DIR")
    if not programs:
        text = f"runs on GPUs keep them in {programs_folder()}, on CPUs beside it"
        yield ok("compilations", text)
    elif "://" in programs:
        yield unchecked("compilations", f"{programs} is no folder of this machine")
    else:
        remedy = "set JAX_COMPILATION_CACHE_DIR to a folder of yours with room"
        yield _check_folder(Path(programs), "compilations", remedy)


def _check_folder(folder: Path, check: str, remedy: str) -> Finding:
    """Check that a folder can be written and has room, and that others cannot write programs into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A write, because the mode of a folder does not show a full or read-only file system.
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
        free = shutil.disk_usage(folder).free
        mode = folder.stat().st_mode
    except OSError as error:
        return wrong(check, f"{folder} cannot be written ({os.strerror(error.errno or 0).lower()})", remedy)
    if free < CACHE_BYTES:
        return wrong(check, f"{folder} has {free / 1e6:,.0f} MB free", remedy)
    if mode & 0o002 and check == "compilations":
        text = f"everybody may write to {folder}, and so run programs as you"
        return wrong(check, text, f"chmod go-w {folder}")
    return ok(check, f"{folder}, {free / 1e9:,.0f} GB free")
