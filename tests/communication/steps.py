"""Compiled train steps to read: those that a configuration asks for, as the trainer compiles them."""

from functools import cache

import jax

from jaxdist import models
from jaxdist.config import Config, ModelConfig, ParallelConfig, TrainConfig
from jaxdist.mesh import devices_asked, make_mesh, parse_mesh
from jaxdist.training.run import Run
from tests.parity import cases

PLAIN = ParallelConfig()


def mesh_of(text: str) -> jax.sharding.Mesh:
    shape = parse_mesh(text)
    return make_mesh(shape, jax.devices()[: devices_asked(shape)])


def config(mesh: str, accumulation: int = 1, model: ModelConfig = cases.MODEL, parallel: ParallelConfig = PLAIN):
    """In float32 with AdamW, for batches of `cases.ROWS` rows."""
    train = TrainConfig(global_batch_size=cases.ROWS, accumulation=accumulation)
    return Config(mesh=mesh, precision="float32", model=model, parallel=parallel, train=train)


def run(*of, **also) -> Run:
    return Run(config(*of, **also))


def lower(*of, **also) -> jax.stages.Lowered:
    """The train step of `run(...)`."""
    asked = run(*of, **also)
    with jax.set_mesh(asked.mesh):
        return asked.lower()


def compiled(*of, **also) -> jax.stages.Compiled:
    return _compiled(config(*of, **also))


@cache
def _compiled(config: Config) -> jax.stages.Compiled:
    asked = Run(config)
    with jax.set_mesh(asked.mesh):
        return asked.lower().compile()


def parameters(model: ModelConfig) -> int:
    return models.parameters(models.build(model))
