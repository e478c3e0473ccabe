"""Check that a run fits the devices that a launcher gives it, on this machine or on the nodes of a job."""

from __future__ import annotations

from jaxdist.config import Config, RequestError
from jaxdist.config.values import MOST_DEVICES
from jaxdist.mesh import AUTO, FILL, MOST_CPU_DEVICES, devices_asked, fill, fixed_devices, requested
from jaxdist.mesh.split import Split
from jaxdist.output.units import counted, divisors
from jaxdist.request.checks.mesh import check_mesh_fits, fits, fitting, refilled


def check_nodes(config: Config, fewest: int, most: int, gpus: int, tasks: int) -> None:
    """Raise `RequestError` if the mesh, or a size of the run, does not fit the devices of `fewest` to `most` nodes.

    `gpus` and `tasks` are the numbers for one node; without GPUs each task splits its CPU into devices.
    """
    # A mesh without a `-1` fits only one number of nodes.
    if fewest != most and FILL not in requested(config.mesh).values():
        raise RequestError(
            f"mesh {config.mesh} is the same on {fewest}-{most} nodes; let one axis fill them, such as -1x1x1"
        )
    if gpus:
        check_gpus(
            config,
            fewest * gpus,
            most * gpus,
            f"{counted(most, 'node')} with {counted(gpus, 'GPU')} each, {most * gpus} in all",
        )
    else:
        check_cpus(config, most * tasks, f"{counted(most, 'node')} with {counted(tasks, 'process')} each")


def idle(config: Config, fewest: int, most: int, each: int) -> str:
    """Return a sentence if the run leaves devices idle on some of `fewest` to `most` nodes with `each` devices.

    The global batch is the same on all of them, so that it, or its micro-batches, may not divide by all devices.
    """
    used = {nodes: fitting(config, nodes * each) for nodes in range(fewest, most + 1)}
    rows = [f"{count} of {nodes * each} on {nodes}" for nodes, count in used.items() if count < nodes * each]
    if not rows:
        return ""
    train = config.train
    return (
        f"not all devices have work on each number of nodes ({', '.join(rows[:3])}): train.global_batch_size "
        f"{train.global_batch_size} in {counted(train.accumulation, 'micro-batch')} does not divide by all of them"
    )


def check_gpus(config: Config, fewest: int, most: int, where: str) -> None:
    """Raise `RequestError` if the mesh, or a size of the run, does not fit the GPUs that `where` describes."""
    if most > MOST_DEVICES:
        raise RequestError(f"{where}: a run has at most {MOST_DEVICES}; ask for fewer")
    shape = requested(config.mesh)
    fixed = fixed_devices(shape)
    matches = fixed == most
    if FILL in shape.values():
        # The largest number of nodes must fit exactly; the smallest must hold at least the fixed axes.
        matches = most % fixed == 0 and fixed <= fewest
    if not matches:
        raise RequestError(f"mesh {config.mesh} does not fit {where}: its axes must multiply to the number of devices")
    check_sizes(config, most)


def check_cpus(config: Config, processes: int, where: str) -> None:
    """Raise `RequestError` as `check_gpus` does, for processes that split their CPU into devices."""
    devices = devices_asked(requested(config.mesh), processes)
    each, rest = divmod(devices, processes)
    if rest:
        raise RequestError(
            f"mesh {config.mesh} does not fit {where}: its {counted(devices, 'CPU device')} do not divide "
            f"by {counted(processes, 'process')}; ask for another mesh, or another number of processes"
        )
    if each > MOST_CPU_DEVICES:
        raise RequestError(
            f"mesh {config.mesh} does not fit {where}: each would split its CPU into {each} devices, but at most "
            f"{MOST_CPU_DEVICES} are possible"
        )
    check_sizes(config, devices)


def check_sizes(config: Config, devices: int) -> None:
    """Raise `RequestError` if a size of the run does not divide over the mesh on `devices` devices."""
    # The automatic mesh is chosen so that the sizes divide.
    if config.mesh != AUTO:
        used = fitting(config, devices)
        check_mesh_fits(Split(refilled(config, used), fill(requested(config.mesh), used)))


def fills(config: Config, processes: int, each: int) -> bool:
    """Return whether a mesh with a `-1` uses all devices of `processes` processes with `each` devices."""
    return FILL in requested(config.mesh).values() and fits(config, processes * each)


def tasks_per_node(requested: int, gpus: int) -> int:
    """Return the number of processes of a node: `requested`, or if 0 one per GPU, or 1.

    Raises `RequestError` if the GPUs of a node do not divide by its processes.
    """
    if gpus and requested and gpus % requested:
        choices = ", ".join(str(n) for n in divisors(gpus))
        raise RequestError(
            f"{counted(gpus, 'GPU')} of a node cannot be divided by {requested} processes; ask for {choices} of them"
        )
    return requested or gpus or 1
