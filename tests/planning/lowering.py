"""Functions for other processes to lower: they have to be importable there."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import RequestError
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.attention import causal_attention
from jaxdist.models.scores import Scores
from jaxdist.sharding import Layout


def product(devices):
    """Rows over all devices, and a sum over them, which needs an all-reduce."""
    mesh = jax.sharding.Mesh(np.array(devices), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("data"))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    x = jax.ShapeDtypeStruct((16 * len(devices), 256), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((256, 128), jnp.float32, sharding=whole)
    print("said on standard output")
    os.system("echo said by another program")
    return jax.jit(lambda x, w: (x @ w).sum(0), out_shardings=whole).lower(x, w)


def attention(devices, window=0):
    """Causal, forward and backward, as a model has it on GPUs that can run cuDNN's."""
    mesh = make_mesh(parse_mesh(f"{len(devices)}x1x1"), devices)
    layout = Layout.on(mesh)
    place = jax.NamedSharding(mesh, layout.activation("BSNH"))
    q, kv = (jax.ShapeDtypeStruct((8, 256, heads, 64), jnp.bfloat16, sharding=place) for heads in (8, 4))
    loss = lambda q, k, v: causal_attention(layout, Scores.of(64, window), q, k, v).astype(jnp.float32).sum()
    with jax.set_mesh(mesh):
        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, kv, kv)


def cpu_count(devices):
    raise ValueError(f"{len(devices)} x {devices[0].platform}")


def mistakes(devices):
    raise RequestError("the first", "the second")


def bug(devices):
    return {}["key"]


def crash(devices):
    os.write(2, b"last words\n")
    os.kill(os.getpid(), signal.SIGKILL)


EARLY, LATE = 1024 * 1024, 2048 * 2048
"""Elements of a device that `gathered_and_summed` sends."""


def gathered_and_summed(devices):
    """What is given goes to all devices, beside which there is a product to compute; that product is added up."""
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))

    def on_each(early, x):
        return jax.lax.all_gather(early, "data"), jax.lax.psum(x @ x, "data")

    mapped = jax.shard_map(on_each, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    shapes = (1024, 1024), (2048, 2048)
    return jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole) for shape in shapes))
