"""The device mesh: its axes, how a person writes it, and how it is laid over the devices.

`2x2x1` is data x model x pipeline; any axis can be named instead (`replica=2,data=4`). One axis may be `-1`: as
many as the devices allow. This is the only file that spells the names of the axes.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jaxdist.config import Config, RequestError, nearest
from jaxdist.values import MOST_DEVICES

if TYPE_CHECKING:
    import jax

PIPELINE, REPLICA, DATA, EXPERT, CONTEXT, MODEL = "pipeline", "replica", "data", "expert", "context", "model"

AXES = (PIPELINE, REPLICA, DATA, EXPERT, CONTEXT, MODEL)
"""Outermost first, so that the axis that talks most (`model`) spans neighbouring devices, with the fastest links."""

POSITIONS = (DATA, MODEL, PIPELINE)
"""What the numbers of the short form `2x2x1` mean."""

BATCH_AXES = (REPLICA, DATA)
"""The axes that split the rows of a batch."""

LAYER_AXES = (MODEL,)
"""The axes that may split the dims of a layer: its heads, its MLP, the vocabulary."""

FAST = (EXPERT, CONTEXT, MODEL)
"""The axes that send in every layer, and want the fastest links."""

BUILT = (*BATCH_AXES, *LAYER_AXES, PIPELINE)
"""The axes whose feature this version has; the others must be 1."""

MOST_CPU_DEVICES = 1024
"""JAX takes CPU devices with numbers from 2048 for those of other processes."""

GPU_SHARE = 0.92
"""Of a GPU's memory, what JAX takes in jaxdist's commands where the environment does not say; the rest stays with
CUDA's context, its libraries and NCCL's buffers. By itself JAX takes 0.75."""

FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Of the environment, which says what JAX takes: the new name and the old one."""

FILL = -1

AUTO = "auto"
"""For a mesh that `train` chooses when it sees the devices."""

MeshShape = dict[str, int]
"""Size of every axis in `AXES`; one of them may be `FILL`."""


def gpu_share() -> float:
    """The part of a GPU's memory that JAX may take in a command of jaxdist's, with this environment.

    Raises `RequestError` where the environment gives no number.
    """
    asked = next((os.environ[name] for name in FRACTIONS if os.environ.get(name)), "")
    if not asked:
        return GPU_SHARE if preallocates() else 0.75
    try:
        share = float(asked)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        names = " or ".join(FRACTIONS)
        raise RequestError(f"{names} is '{asked[:40]}' in the environment; it must be a number above 0, such as 0.9")
    return share


def preallocates() -> bool:
    """Whether JAX takes that memory at once; where it does not, jaxdist leaves the bound to it too."""
    return os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("0", "false", "False")


def parse_mesh(text: str) -> MeshShape:
    """Read `2x2x1` or `data=2,replica=2`; axes that are not named are 1.

    Raises `RequestError` with every mistake in the text, one sentence each.
    """
    if text == AUTO:
        raise RequestError(f"mesh '{AUTO}' is for train alone; write a mesh, such as one of python -m jaxdist.plan")
    named = "=" in text
    items = text.split(",") if named else text.split("x")
    if not named and len(items) != len(POSITIONS):
        raise RequestError(
            f"mesh '{text}' has {len(items)} number(s): write data x model x pipeline, such as 4x1x1, "
            f"or name the axes, such as data=4,replica=2"
        )
    shape, problems = dict.fromkeys(AXES, 1), []
    seen: set[str] = set()
    for position, item in enumerate(items):
        axis, _, size = item.strip().partition("=") if named else (POSITIONS[position], "", item.strip())
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
    if sum(size == FILL for size in shape.values()) > 1:
        problems.append(f"mesh '{text}' has more than one -1; only one axis can be filled")
    for axis, size in shape.items():
        if axis not in BUILT and size != 1:
            problems.append(
                f"mesh '{text}' asks for {axis}={size}, but {axis} parallelism is not built yet; set {axis} to 1"
            )
    if (devices := devices_asked(shape)) > MOST_DEVICES:
        problems.append(f"mesh '{text}' asks for {devices} devices; at most {MOST_DEVICES} are planned or used")
    if problems:
        raise RequestError(*problems)
    return shape


def requested(text: str) -> MeshShape:
    """As `parse_mesh`, before the devices are seen: `auto` asks for as many as there are."""
    return parse_mesh(f"{DATA}={FILL}" if text == AUTO else text)


def devices_asked(shape: Mapping[str, int], processes: int = 1) -> int:
    """How many devices the mesh needs; a `-1` counts as one per process, its meaning where devices can be made."""
    fixed = math.prod(size for size in shape.values() if size != FILL)
    return fixed * processes if FILL in shape.values() else fixed


def fill(shape: Mapping[str, int], devices: int) -> MeshShape:
    """Replace `-1`, and check that the mesh uses every one of `devices`.

    Raises `RequestError` when it does not: an idle GPU is paid for like a busy one.
    """
    fixed = math.prod(size for size in shape.values() if size != FILL)
    if FILL in shape.values() and devices % fixed == 0:
        shape = {axis: devices // fixed if size == FILL else size for axis, size in shape.items()}
    if FILL in shape.values() or fixed_product(shape) != devices:
        raise RequestError(
            f"mesh {describe(shape)} does not use all {devices} device(s): the product of its axes must be "
            f"{devices}, such as data={devices}; or hide devices with CUDA_VISIBLE_DEVICES"
        )
    return dict(shape)


def fixed_product(shape: Mapping[str, int]) -> int:
    return math.prod(shape.values())


def describe(shape: Mapping[str, int]) -> str:
    """`data=4 replica=2`: the axes that are not 1, outermost first."""
    return " ".join(f"{axis}={shape[axis]}" for axis in AXES if shape[axis] != 1) or "one device"


def micro_batches(config: Config, shape: Mapping[str, int]) -> int:
    """k: into how many parts a step cuts its rows; with a pipeline its micro-batches, else those of accumulation."""
    return config.pipeline.micro if shape.get(PIPELINE, 1) > 1 else config.train.accumulation


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device]) -> jax.sharding.Mesh:
    """The mesh of `shape` over `devices`, in `AXES` order, with Explicit axes: the layout of an array is its type."""
    import jax
    import numpy as np

    shape = fill(shape, len(devices))  # `jax.make_mesh` would drop the devices that are left over without a word
    grid = np.asarray(devices, dtype=object).reshape([shape[axis] for axis in AXES])
    return jax.sharding.Mesh(grid, AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(AXES))


def abstract_mesh(shape: Mapping[str, int]) -> jax.sharding.AbstractMesh:
    """The mesh of `shape` without devices: enough to tell where everything would lie."""
    import jax

    sizes = tuple(shape[axis] for axis in AXES)
    return jax.sharding.AbstractMesh(sizes, AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(AXES))
