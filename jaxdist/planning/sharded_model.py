"""A model split over a mesh: what predictions of memory, communication and time read, made once for each mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from jaxdist.config import Config
from jaxdist.mesh import REPLICA
from jaxdist.mesh.split import Split
from jaxdist.models import Model
from jaxdist.models.foreign import Foreign
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.parallel.placing import ZeroOptions, placements
from jaxdist.parallel.vocabulary import Vocabulary
from jaxdist.planning import frozen
from jaxdist.planning.parameter_layout import Placed, lay_out
from jaxdist.planning.pipelines import Pipeline, pipeline_of
from jaxdist.sharding import Layout


@dataclass(frozen=True)
class ShardedModel:
    """A model, and how a configuration splits it over a mesh. It runs nothing and touches no device."""

    split: Split
    """The precision of its configuration is resolved, no longer `auto`."""
    model: Model | Foreign
    layout: Layout

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.split.config

    @cached_property
    def pipe(self) -> Pipeline | None:
        """The pipeline, or None without one. Raises `ValueError` as `stages_of` does."""
        return pipeline_of(self.split)

    @cached_property
    def parameters(self) -> list[Placed]:
        """Every parameter, in the order in which the model names them.

        In a pipeline, the parameters of layers are [v, S, depth, ...], as ranks hold them, padding included. Tables
        have the rows that the mesh adds to the vocabulary.
        """
        zero = ZeroOptions.of(self.split)
        if isinstance(self.model, Foreign):
            places = placements(self.layout, self.model.axes, self.model.abstract, zero)
            return lay_out(self.layout, self.model.axes, self.model.abstract, places)
        stages = self.pipe.stages if self.pipe else None
        # From stage 1 on, parameters lie alike: the stages differ in when these move.
        zero = replace(zero, stage=min(zero.stage, 1))
        return _of_decoder(self.model, self.layout, stages, zero, frozen.forward_only(self.config))

    @cached_property
    def of_one_replica(self) -> ShardedModel:
        """What each replica computes by itself."""
        return ShardedModel(self.split.of_one_replica, self.model, self.layout.without(REPLICA))

    def with_knobs(self, values: Mapping[str, object]) -> ShardedModel:
        """Return the same model on the same mesh, with these values of knobs that change the layout of neither."""
        return replace(self, split=self.split.with_knobs(values))


# The candidates of a search lay out one model, and many of them alike.
@lru_cache(maxsize=64)
def _of_decoder(
    model: Model, layout: Layout, stages: Stages | None, zero: ZeroOptions, forward_only: frozenset[str]
) -> list[Placed]:
    """Return every parameter of a decoder; `forward_only` are names that the model itself does not give."""
    abstract = Vocabulary(layout, model.vocab).abstract(model.abstract)
    axes = model.axes
    if stages:
        abstract = stages.abstract(abstract)
        axes = stages.axes(axes)
    places = placements(layout, axes, abstract, zero)
    return lay_out(layout, axes, abstract, places, model.forward_only | forward_only, model.exact)
