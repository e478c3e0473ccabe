"""The processes of a job joined, and their devices. Without an accelerator the CPUs are split into as many devices as
the mesh needs, the same number in each process."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import jax

from jaxdist.cluster import board
from jaxdist.cluster.place import Place, check_own_name, named_loopback
from jaxdist.config import FaultConfig, RequestError
from jaxdist.mesh import FILL, MOST_CPU_DEVICES, abstract_mesh, describe, devices_asked, fill, make_mesh

NO_GPU = "JAX's CUDA plug-in is installed but finds no NVIDIA GPU here: the CPU is used (JAX_PLATFORMS=cpu asks for it)"

SHUTDOWN_SECONDS = 60
"""How long the first process that is done waits for the others."""


def join(place: Place, fault: FaultConfig) -> None:
    """Meet the other processes of the job, if there are any. Before anything asks JAX for a device.

    Raises `RequestError` where process 0 cannot be met; ends the process where the others do not come in time.
    """
    if place.alone:
        return
    host, port = place.coordinator.rsplit(":", 1)
    if not named_loopback(host) and not _nvidia():
        check_own_name()
    if place.leader:
        check_free(int(port))
    meet(place, fault, lambda: _nobody_came(place, fault.start_seconds))


def meet(place: Place, fault: FaultConfig, otherwise: Callable[[], None]) -> None:
    """Meet the others without a look at what may be in the way; `otherwise` is called, in a thread, after
    `fault.start_seconds`, and had better end the process."""
    if not place.leader:
        logging.getLogger("jax").setLevel(logging.ERROR)  # process 0 tells it
    _keep_gloo_off_standard_output()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, and tells nobody
    late = threading.Timer(fault.start_seconds, otherwise)
    late.daemon = True
    late.start()  # JAX would abort, with a trace of C++
    jax.distributed.initialize(
        place.coordinator,
        place.processes,
        place.process,
        place.gpus,
        cluster_detection_method="deactivate",
        initialization_timeout=fault.start_seconds + 60,
        heartbeat_timeout_seconds=fault.heartbeat_seconds,
        shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
    late.cancel()


def check_free(port: int) -> None:
    """Raise `RequestError` if another program listens there."""
    with socket.socket() as test:
        test.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            test.bind(("", port))
        except OSError as error:
            raise RequestError(
                f"port {port} of the coordinator is not free here ({error.strerror}); name another"
            ) from error


def _nobody_came(place: Place, seconds: int) -> None:
    print(
        f"[{place.name}] after {seconds} s not all {place.processes} processes have met at {place.coordinator}; "
        f"see what the others say, or raise fault.start_seconds",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _keep_gloo_off_standard_output() -> None:
    """It tells there, in C++, to whom it is connected; Python's own output goes where it went."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def start(shape: Mapping[str, int]) -> jax.sharding.Mesh:
    """The mesh of `shape` over the devices of all processes, all of them where they are accelerators.

    Must run before anything else asks JAX for a device: CPU devices can only be made before the first use.
    """
    asked = devices_asked(shape, board.processes())
    devices = _at_least(asked, f"mesh {describe(fill(shape, asked))} needs")
    if devices[0].platform == "cpu":  # virtual devices: one left over is no hardware left idle
        devices = devices[:asked]
    return make_mesh(fill(shape, len(devices)), devices)


def first(count: int, wanted: str) -> list[jax.Device]:
    """The first `count` devices of this machine, for what uses a part of them on purpose. As early as `start`.

    `wanted` begins the sentence of a `RequestError` where there are not so many: `--devices 1,2,4 needs`.
    """
    devices = _at_least(count, wanted)
    if len(devices) < count:
        raise RequestError(
            f"{wanted} {count} devices, but this machine has {len(devices)} ({devices[0].device_kind}); "
            f"ask for {len(devices)} or fewer, or use its CPU with JAX_PLATFORMS=cpu"
        )
    return devices[:count]


def _at_least(count: int, wanted: str) -> list[jax.Device]:
    """All devices; where they are a CPU's there are `count` or more. `wanted` begins the sentence if there are not."""
    processes = board.processes()
    each = -(-count // processes)
    _split_cpu(min(each, MOST_CPU_DEVICES))
    devices = _devices()
    if devices[0].platform == "cpu":
        if each > MOST_CPU_DEVICES:
            raise RequestError(
                f"{wanted} {count} devices, but a CPU is split into {MOST_CPU_DEVICES} at most; ask for fewer"
            )
        if count % processes:
            raise RequestError(
                f"{wanted} {count} devices, which do not divide by {processes} processes; start {_divisors(count)} "
                f"processes, or ask for another mesh"
            )
        if len(devices) < count:
            raise RequestError(
                f"{wanted} {count} CPU devices, but this process has made {len(devices)} already; start a new "
                f"process, or set XLA_FLAGS without --xla_force_host_platform_device_count"
            )
    return devices


def imagine(shape: Mapping[str, int]) -> jax.sharding.AbstractMesh:
    """The mesh of `shape` without its devices, of which any number will do; `-1` is filled with those of here."""
    devices = _devices()
    fixed = FILL not in shape.values() or devices[0].platform == "cpu"
    return abstract_mesh(fill(shape, devices_asked(shape) if fixed else len(devices)))


def _divisors(count: int) -> str:
    return ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)


def _devices() -> list[jax.Device]:
    """Those of JAX. A CUDA plug-in without an NVIDIA GPU, good for compiling for one, is told in a sentence.

    JAX tells it as an error, with a traceback.
    """
    logger = logging.getLogger("jax._src.xla_bridge")
    if _nvidia():
        return jax.devices()
    logger.addFilter(_in_a_sentence)
    try:
        return jax.devices()
    finally:
        logger.removeFilter(_in_a_sentence)


def _nvidia(devices: Path = Path("/dev")) -> bool:
    """Whether this machine has a driver of NVIDIA's, on Linux or on Windows' Linux."""
    return any(devices.glob("nvidia*")) or (devices / "dxg").exists()


def _in_a_sentence(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    if "plugin configuration error" in text and "cuda" in text:
        record.msg, record.args, record.exc_info = NO_GPU, (), None
    return True


def _split_cpu(count: int) -> None:
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return  # the user has split it
    with suppress(RuntimeError):  # too late: `start` counts what is there
        jax.config.update("jax_num_cpu_devices", count)


def capacity(device: jax.Device) -> int | None:
    """Bytes of memory that the device has; for a CPU device, those of the machine, which all its devices share."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit")


def cores() -> int:
    """CPU cores that this process may use, which all CPU devices share."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # not on macOS


def peak_bytes(device: jax.Device) -> int | None:
    """Most bytes that were in use on the device so far; None where the backend does not tell, as on CPU."""
    return (device.memory_stats() or {}).get("peak_bytes_in_use")
