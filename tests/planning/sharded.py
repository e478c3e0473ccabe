"""A model on a mesh, from a layout that a test has made by itself."""

from jaxdist.config import Config
from jaxdist.mesh import AXES
from jaxdist.mesh.split import Split
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.planning.sharded_model import ShardedModel
from jaxdist.sharding import Layout


def sharded_by(config: Config, model: Model | Foreign, layout: Layout) -> ShardedModel:
    return ShardedModel(Split(config, dict.fromkeys(AXES, 1) | dict(layout.axes)), model, layout)
