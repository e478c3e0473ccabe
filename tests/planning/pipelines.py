"""Configurations of small pipelines, and layouts of meshes that have no devices."""

from jaxdist.config import Config, ModelConfig, ParallelConfig, PipelineConfig, RulesConfig, TrainConfig
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.planning.hardware import GPUS
from jaxdist.sharding import Layout

MODEL = ModelConfig(layers=4, embed=32, heads=4, vocab=96, sequence=16, remat="stage")


def config(
    mesh: str,
    schedule: str = "1f1b",
    microbatches: int = 4,
    virtual: int = 0,
    zero: int = 0,
    precision: str = "float32",
    sequence: bool = False,
    whole_vocab: bool = False,
    rows: int = 16,
    **model,
) -> Config:
    """Of `MODEL`, with `model` in it."""
    split = RulesConfig(vocab="") if whole_vocab else RulesConfig()
    return Config(
        mesh=mesh,
        precision=precision,
        model=MODEL.model_copy(update=model),
        parallel=ParallelConfig(zero=zero, sequence=sequence, rules=split),
        pipeline=PipelineConfig(schedule=schedule, microbatches=microbatches, virtual_stages=virtual),
        train=TrainConfig(global_batch_size=rows),
    )


def laid(config: Config) -> Layout:
    shape = parse_mesh(config.mesh)
    return Layout.of(Split(config, shape), abstract_mesh(shape), GPUS["h100"])
