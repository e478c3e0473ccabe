"""Compiled train steps to read: on any mesh, with any layout."""

from functools import cache

import jax
import jax.numpy as jnp
import optax

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig
from jaxdist.mesh import devices_asked, make_mesh, parse_mesh
from jaxdist.sharding import Layout, rules
from jaxdist.training.step import Step
from tests.parity import cases

PLAIN = ParallelConfig()


def mesh_of(text: str) -> jax.sharding.Mesh:
    shape = parse_mesh(text)
    return make_mesh(shape, jax.devices()[: devices_asked(shape)])


def lower(
    mesh: str,
    accumulation: int = 1,
    model: ModelConfig = cases.MODEL,
    parallel: ParallelConfig = PLAIN,
    dtype=jnp.float32,
) -> jax.stages.Lowered:
    """One AdamW step, its state donated, on rows of `cases`."""
    devices = mesh_of(mesh)
    layout = Layout.on(devices, rules(Config(model=model, parallel=parallel), devices.shape))
    step = Step(
        models.build(model, layout),
        layout,
        optax.adamw(1e-3),
        dtype=dtype,
        remat=model.remat,
        dropout=model.dropout > 0,
        stage=parallel.zero,
        inside=parallel.micro_batches == "inside",
    )
    with jax.set_mesh(devices):
        state = jax.eval_shape(step.init, jax.random.key(0))
        batch = cases.on_mesh(devices, layout, *cases.rows(), accumulation)
        return jax.jit(step.train, donate_argnums=0).lower(state, batch)


@cache
def compiled(
    mesh: str,
    accumulation: int = 1,
    model: ModelConfig = cases.MODEL,
    parallel: ParallelConfig = PLAIN,
    dtype=jnp.float32,
) -> jax.stages.Compiled:
    return lower(mesh, accumulation, model, parallel, dtype).compile()


def parameters(model: ModelConfig) -> int:
    return models.parameters(models.build(model))
