"""Compiled programs to read: made by hand, or from a function that every device runs."""

import math

import jax
import jax.numpy as jnp

from jaxdist.mesh import AXES, make_mesh
from jaxdist.programs.hlo import Collective, collectives


def mesh_of(devices=None, **sizes: int) -> jax.sharding.Mesh:
    shape = dict.fromkeys(AXES, 1) | sizes
    return make_mesh(shape, (devices or jax.devices())[: math.prod(shape.values())])


CUBE = mesh_of(replica=2, data=2, model=2)
BLOCK = (8, 16)
"""What each device holds of the array that `found` gives to its function."""

OVER_MODEL = "channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add"
"""Attributes of a collective over `model` of `CUBE`."""


def found(function, mesh=CUBE, dtype=jnp.float32) -> list[Collective]:
    """The collectives of `function`, which every device runs on its own block."""
    spec = jax.P(AXES)
    mapped = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    array = jax.ShapeDtypeStruct((mesh.size * BLOCK[0], BLOCK[1]), dtype, sharding=jax.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        return collectives(mapped.lower(array).compile().as_text(), mesh)


def program(*instructions: str, before: str = "", header: str = "is_scheduled=true, num_partitions=8") -> str:
    """The instructions are called %0, %1, ..."""
    return f"HloModule m, {header}\n\n{before}\n\nENTRY {computation('main', *instructions)}\n"


def computation(name: str, *instructions: str) -> str:
    lines = "\n".join(f"  %{i} = {instruction}" for i, instruction in enumerate(instructions))
    return f"%{name} (p: f32[8]) -> f32[8] {{\n{lines}\n}}"


def read(*instructions: str, before: str = "") -> list[Collective]:
    return collectives(program(*instructions, before=before), CUBE)


def looped(*condition: str) -> str:
    """A loop around the all-reduce of a tuple, whose length only its condition tells."""
    inner = computation("inner", f"(f32[8]{{0}}, bf16[8]{{0}}) all-reduce(%p, %q), {OVER_MODEL}")
    less = computation("less", "pred[] compare(%i, %n), direction=LT")
    before = f"{inner}\n\n{less}\n\n{computation('until', *condition)}"
    return program("f32[8]{0} while(%p), condition=%until, body=%inner", before=before)
