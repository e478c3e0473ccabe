"""Functions for other processes to lower: they have to be importable there."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import RequestError


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


def cpu_count(devices):
    raise ValueError(f"{len(devices)} x {devices[0].platform}")


def mistakes(devices):
    raise RequestError("the first", "the second")


def bug(devices):
    return {}["key"]


def crash(devices):
    os.write(2, b"last words\n")
    os.kill(os.getpid(), signal.SIGKILL)
