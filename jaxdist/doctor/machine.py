"""Checks of the machine before JAX is imported: its driver, its limits, the folders of its caches."""

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

LEAST_DRIVER = {12: 525, 13: 580}
"""NVIDIA's driver for each version of CUDA, as JAX's installation guide has it."""

FILES, FILES_EACH = 256, 16
"""Files open at a time: of the run itself, and of each process that it talks to."""

ROOM = 500_000_000
"""Bytes that a cache should have."""

SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm for NCCL between processes of one host; Docker gives 64 MiB."""


def driver(here: Here, root: Path = Path("/")) -> Iterator[Finding]:
    """NVIDIA's driver and its GPUs, as they are without JAX; `root` is where /proc and /dev lie."""
    rows, problem = _smi()
    names, version, here.buses = [row[0] for row in rows], rows[0][1] if rows else "", tuple(row[2] for row in rows)
    proc, devices = root / "proc/driver/nvidia", list((root / "dev").glob("nvidia[0-9]*"))
    here.gpus = len(names) or len(list((proc / "gpus").glob("*"))) or len(devices)
    if problem:
        yield wrong("driver", problem, "let the administrator mend the driver; a restart helps after an update")
    elif devices and not names and not (proc / "version").exists():
        said = f"{len(devices)} device(s) /dev/nvidia*, but neither nvidia-smi nor /proc/driver/nvidia"
        yield wrong("driver", said, "give the container NVIDIA's driver (--nv, --gpus all), or load its kernel module")
    elif not here.gpus:
        yield ok("driver", "no NVIDIA GPU: neither nvidia-smi nor /proc/driver/nvidia shows one")
    else:
        yield from _with_gpus(here, names, version)


def _smi() -> tuple[list[list[str]], str]:
    """(name, version of the driver and place on the bus of each GPU; what is wrong), as nvidia-smi has it."""
    if not shutil.which("nvidia-smi"):
        return [], ""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,pci.bus_id", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], f"nvidia-smi does not answer ({error})"
    lines = [line for line in (done.stdout or done.stderr).splitlines() if line.strip()]
    if done.returncode:
        return [], f"nvidia-smi fails: {lines[0] if lines else f'exit code {done.returncode}'}"
    return [[part.strip() for part in line.split(",")] for line in lines if line.count(",") == 2], ""


def _with_gpus(here: Here, names: Sequence[str], version: str) -> Iterator[Finding]:
    kinds = ", ".join(dict.fromkeys(names)) or "NVIDIA"
    plugins = [cuda for cuda, parts in PLUGINS.items() if installed(parts[0])]
    visible = here.environment.get("CUDA_VISIBLE_DEVICES")
    numbers = [int(one) for one in (visible or "").split(",") if one.strip().isdecimal()]
    found = []
    if absent := [number for number in numbers if number >= here.gpus]:
        said = f"CUDA_VISIBLE_DEVICES is {visible}, but GPU {absent[0]} is none of the {here.gpus} here (from 0): "
        found.append(wrong("driver", said + "CUDA hides it and those after it", "correct or unset it"))
    if not plugins:
        said = f"{here.gpus} GPU(s), but JAX's CUDA plug-in is not installed: JAX would use the CPU"
        found.append(wrong("driver", said, "pip install 'jaxdist[gpu]' (CUDA 12) or 'jaxdist[gpu13]' (CUDA 13)"))
    major = version.partition(".")[0]
    for cuda in plugins:
        if major.isdecimal() and int(major) < LEAST_DRIVER[cuda]:
            said = f"driver {version} is too old for CUDA {cuda}, which needs {LEAST_DRIVER[cuda]}"
            older = " or install 'jaxdist[gpu]' (CUDA 12)" if cuda == 13 and int(major) >= LEAST_DRIVER[12] else ""
            found.append(wrong("driver", said, f"update the driver{older}"))
    yield from found or [ok("driver", f"{here.gpus} x {kinds}, driver {version or 'of a version that is not told'}")]


def limits(here: Here, root: Path = Path("/")) -> Iterator[Finding]:
    """Open files, locked memory for InfiniBand, shared memory for NCCL."""
    needed, found = FILES + FILES_EACH * here.place.processes, []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        said = f"at most {soft} open files; {here.place.processes} process(es) need about {needed}"
        enough = hard == resource.RLIM_INFINITY or hard >= needed
        remedy = f"ulimit -n {max(needed, 4096) if hard < 0 else min(hard, max(needed, 4096))}"
        found.append(wrong("limits", said, remedy if enough else "ask the administrator for more"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    cards = list((root / "sys/class/infiniband").glob("*"))
    if cards and locked != resource.RLIM_INFINITY:
        said = f"at most {locked:,} bytes of locked memory, but InfiniBand ({cards[0].name}) needs more"
        found.append(wrong("limits", said, "ulimit -l unlimited; under Slurm PropagateResourceLimitsExcept=MEMLOCK"))
    if here.gpus > 1 and (room := shutil.disk_usage(root / "dev/shm").total) < SHARED_MEMORY:
        said = f"/dev/shm has {room / 2**20:.0f} MiB, in which NCCL may find no room"
        found.append(warning("limits", said, "give the container --shm-size=8g or --ipc=host"))
    yield from found or [ok("limits", f"{'any number of' if soft < 0 else soft} open files")]


def caches(here: Here) -> Iterator[Finding]:
    """The folder of the tokens, and that of compiled programs."""
    from jaxdist.data.corpus import cache_folder, programs_folder

    yield _folder(cache_folder(), "cache", "set JAXDIST_CACHE to a folder of yours with room")
    programs = here.environment.get("JAX_COMPILATION_CACHE_DIR")
    if not programs:
        said = f"runs on GPUs keep them in {programs_folder()}, others in JAX_COMPILATION_CACHE_DIR"
        yield ok("compilations", said)
    elif "://" in programs:
        yield unchecked("compilations", f"{programs} is no folder of this machine")
    else:
        yield _folder(Path(programs), "compilations", "set JAX_COMPILATION_CACHE_DIR to a folder of yours with room")


def _folder(folder: Path, check: str, remedy: str) -> Finding:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"\0")
            file.flush()
        free, mode = shutil.disk_usage(folder).free, folder.stat().st_mode
    except OSError as error:
        return wrong(check, f"{folder} cannot be written ({os.strerror(error.errno or 0).lower()})", remedy)
    if free < ROOM:
        return wrong(check, f"{folder} has {free / 1e6:,.0f} MB free", remedy)
    if mode & 0o002 and check == "compilations":
        said = f"everybody may write to {folder}, and so run programs as you"
        return wrong(check, said, f"chmod go-w {folder}")
    return ok(check, f"{folder}, {free / 1e9:,.0f} GB free")
