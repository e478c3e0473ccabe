"""Define the device mesh: its axes, how a user writes it, and how it is laid over the devices.

`2x2x1` is data x model x pipeline; any axis can be named instead (`replica=2,data=4`). One axis may be `-1`: it takes
as many devices as remain. HSDP (hybrid sharding) is a mesh with both `replica` and `data`. This is the only file that
spells the names of the axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from jaxdist.config import RequestError, nearest
from jaxdist.config.values import MOST_DEVICES

if TYPE_CHECKING:
    import jax
    import numpy as np

PIPELINE = "pipeline"
REPLICA = "replica"
DATA = "data"
EXPERT = "expert"
CONTEXT = "context"
MODEL = "model"

AXES = (PIPELINE, REPLICA, DATA, EXPERT, CONTEXT, MODEL)
"""Outermost first: the axis that communicates most (`model`) spans neighbouring devices, with the fastest links."""

POSITIONS = (DATA, MODEL, PIPELINE)
"""The axes behind the numbers of the short form `2x2x1`."""

AXES_OVER_SITES = (REPLICA, *(axis for axis in AXES if axis != REPLICA))
"""The order over the devices of several sites: only the gradients of `replica` then cross the slow link between them.
"""

BATCH_AXES = (REPLICA, DATA, EXPERT)
"""The axes that split the rows of a batch. Between its router and its experts, a token crosses `expert`."""

SEQUENCE_AXES = (CONTEXT,)
"""The axes that split the tokens of each row, so that attention on a device sees its own part alone."""

ZERO_AXES = (DATA, EXPERT, CONTEXT)
"""The axes over which ZeRO may shard a parameter, outermost first. Gradients are partial sums over each of them."""

LAYER_AXES = (MODEL,)
"""The axes that may split the dims of a layer: its heads, its MLP, the vocabulary."""

PARAMETER_AXES = (*LAYER_AXES, EXPERT)
"""The axes that may split a dim of a parameter by its name: those of layers, and the one that deals out experts."""

FAST = (EXPERT, CONTEXT, MODEL)
"""The axes that communicate in every layer, and need the fastest links."""

MOST_CPU_DEVICES = 1024
"""Most devices that a CPU is split into: JAX assigns CPU devices numbered 2048 and above to other processes."""

MOST_THAT_COMPUTE = 256
"""Most devices of a CPU that compute. Their threads have to meet in each collective: on two cores 128 generate two
tokens in 14 seconds, 320 in 91, and 999 never do."""

FILL = -1
"""The size of an axis that takes as many devices as remain."""

AUTO = "auto"
"""The mesh that `train` plans for the devices that it finds."""

MeshShape = dict[str, int]
"""Size of every axis in `AXES`; one of them may be `FILL`."""


def parse_mesh(text: str) -> MeshShape:
    """Read `2x2x1` or `data=2,replica=2`; axes that are not named are 1.

    Raises `RequestError` with every mistake in the text, one sentence each.
    """
    return dict(_parsed(text))


@lru_cache
def _parsed(text: str) -> MeshShape:
    """Return what `parse_mesh` does; a request has one text, which many of its checks ask about."""
    if text == AUTO:
        raise RequestError(
            f"mesh '{AUTO}' is valid for train only; write a mesh, such as one that python -m jaxdist.plan proposes"
        )
    sizes = _split_text(text)
    shape = dict.fromkeys(AXES, 1)
    problems = []
    seen: set[str] = set()
    for axis, size in sizes:
        if axis not in AXES:
            problems.append(f"mesh '{text}' names an axis '{axis}' that does not exist; {nearest(axis, AXES)}")
        elif axis in seen:
            problems.append(f"mesh '{text}' names the axis '{axis}' twice; give it once")
        elif not re.fullmatch(r"-1|[1-9][0-9]{0,5}", size):
            problems.append(
                f"mesh '{text}' gives {axis} the size '{size[:20]}'; use a whole number from 1 to 999999, or -1 to fill"
            )
        else:
            shape[axis] = int(size)
        seen.add(axis)
    problems += _shape_problems(text, shape)
    if problems:
        raise RequestError(*problems)
    return shape


def _split_text(text: str) -> list[tuple[str, str]]:
    """Return the axes that a mesh text names, or means by position, each with the text of its size."""
    if "=" in text:
        pairs = [item.strip().partition("=") for item in text.split(",")]
        if len(pairs) > len(AXES):
            # Else each of its sentences would repeat a text that may be very long.
            raise RequestError(
                f"mesh '{text[:50]}...' names {len(pairs)} axes; there are {len(AXES)}: {', '.join(AXES)}; leave out "
                f"those that it names twice, or that do not exist"
            )
        return [(axis, size) for axis, _, size in pairs]
    sizes = text.split("x")
    if len(sizes) != len(POSITIONS):
        raise RequestError(
            f"mesh '{text}' has {len(sizes)} in place of 3 numbers: write data x model x pipeline, such as 4x1x1, "
            f"or name the axes, such as data=4,replica=2"
        )
    return [(axis, size.strip()) for axis, size in zip(POSITIONS, sizes, strict=True)]


def _shape_problems(text: str, shape: MeshShape) -> list[str]:
    problems = []
    if list(shape.values()).count(FILL) > 1:
        problems.append(f"mesh '{text}' has more than one -1; only one axis can be filled")
    devices = devices_asked(shape)
    if devices > MOST_DEVICES:
        problems.append(f"mesh '{text}' asks for {devices} devices; at most {MOST_DEVICES} are planned or used")
    return problems


def requested(text: str) -> MeshShape:
    """Read a mesh as `parse_mesh` does, before the devices are known; `auto` is all of them in `data`.

    An axis of size -1 stays -1 until `fill` knows the number of devices. Raises `RequestError` as `parse_mesh` does.
    """
    if text == AUTO:
        text = f"{DATA}={FILL}"
    return parse_mesh(text)


def devices_asked(shape: Mapping[str, int], processes: int = 1) -> int:
    """Return how many devices the mesh needs.

    A `-1` counts as one per process, which is what it means where the CPU is split into devices.
    """
    fixed = fixed_devices(shape)
    if FILL in shape.values():
        return fixed * processes
    return fixed


def fixed_devices(shape: Mapping[str, int]) -> int:
    """Return the product of the axes of `shape`, without the one to fill."""
    return math.prod(size for size in shape.values() if size != FILL)


def fill(shape: Mapping[str, int], devices: int) -> MeshShape:
    """Return `shape` with `-1` replaced so that the mesh uses all `devices`.

    Raises `RequestError` if it cannot use every one of them: an idle GPU costs as much as a busy one.
    """
    fixed = fixed_devices(shape)
    if FILL in shape.values() and devices % fixed == 0:
        shape = {axis: devices // fixed if size == FILL else size for axis, size in shape.items()}
    # A `-1` that is left means that the other axes do not divide the devices.
    if FILL in shape.values() or math.prod(shape.values()) != devices:
        raise RequestError(
            f"mesh {describe(shape)} does not use all devices, of which there are {devices}: the product of its axes "
            f"must be {devices}, such as data={devices}; or hide devices with CUDA_VISIBLE_DEVICES"
        )
    return dict(shape)


ONE = "one device"
"""How a mesh of a single device is called."""


def describe(shape: Mapping[str, int]) -> str:
    """Return the axes that are not 1, outermost first: `data=4 replica=2`."""
    return " ".join(f"{axis}={shape[axis]}" for axis in AXES if shape[axis] != 1) or ONE


def device_order(sites: int) -> tuple[str, ...]:
    """Return the axes in the order in which they are laid over the devices of a number of sites, outermost first."""
    return AXES_OVER_SITES if sites > 1 else AXES


def device_numbers(shape: Mapping[str, int], sites: int = 1) -> np.ndarray:
    """Return which device stands where in a mesh of `shape`: an array with a dim for each of `AXES`.

    Devices are numbered site by site, and in a site host by host.
    """
    import numpy as np

    order = device_order(sites)
    numbers = np.arange(math.prod(shape.values())).reshape([shape[axis] for axis in order])
    return numbers.transpose([order.index(axis) for axis in AXES])


def axes_across(places: np.ndarray) -> list[str]:
    """Return the axes along which a place changes, such as the host or the site.

    `places` has the place of each device of a mesh: an array with a dim for each of `AXES`. One group of devices along
    an axis that lies in two places is enough.
    """
    return [axis for dim, axis in enumerate(AXES) if (places != places.take([0], axis=dim)).any()]


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device], sites: int = 1) -> jax.sharding.Mesh:
    """Return the mesh of `shape` over `devices`, which lie in `sites` sites, in the order of `device_order`.

    The axes of the mesh itself are always in the order of `AXES`, and Explicit: the layout of an array is part of its
    type. Programs and checkpoints are therefore the same whatever the number of sites.
    """
    import jax
    import numpy as np

    # `jax.make_mesh` would silently drop devices that are left over; `fill` refuses instead.
    shape = fill(shape, len(devices))
    grid = np.asarray(devices, dtype=object)[device_numbers(shape, sites)]
    return jax.sharding.Mesh(grid, AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(AXES))


def abstract_mesh(shape: Mapping[str, int]) -> jax.sharding.AbstractMesh:
    """Return the mesh of `shape` without devices, which is enough to compute every layout.

    `shape` has a size for each of `AXES`, all of them at least 1. JAX is imported here, not before.
    """
    import jax

    sizes = tuple(shape[axis] for axis in AXES)
    return jax.sharding.AbstractMesh(sizes, AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(AXES))
