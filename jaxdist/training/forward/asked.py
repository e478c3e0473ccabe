"""What a step asks of a model: its loss and gradients from its weights, as sums, and where its parameters lie."""

from __future__ import annotations

from typing import Protocol

from jaxtyping import Array, Float, Int, Key

from jaxdist.models import Params
from jaxdist.models.decoder import Aux
from jaxdist.parallel.pipeline.stages import Stages
from jaxdist.parallel.placement import Placements
from jaxdist.sharding import OfRows, Tree, Weighted

Batch = Tree
"""A tree of arrays [k, B, ...]: k micro-batches of B rows."""

Further = dict[str, Float[Array, ""]]
"""What a loss function returns beside the loss, by name."""

Sums = dict[str, Float[Array, ""] | Weighted | OfRows]
"""Sums of what a loss function returns beside the loss: each is divided by what the loss is, or by a weight of its own.
Those of arrays with rows are not sums."""

LOSS = "loss"
"""The name of the loss among such sums, where it is divided by a weight of its own."""

AUX = "arrays with rows"
"""The name of those among such sums."""

Grads = Params
"""Gradients, nested as the parameters are."""

Scale = Float[Array, ""] | None
"""The number by which the backward pass multiplies the summed loss, so that no gradient in float16 is too small to be
held; None: 1."""

Summed = tuple[Float[Array, ""], Grads, Params, Sums, Aux]
"""(loss, gradients, variables, further, aux): all but the variables are sums over what `Forward.count` counts.

Aux are sums over all tokens, stacked as the layers are."""


class Forward(Protocol):
    """How a model's loss and gradients come from its weights: what a step asks of a model."""

    @property
    def places(self) -> Placements:
        """Return where each parameter lies."""

    @property
    def abstract(self) -> Params:
        """Return shapes and dtypes of the parameters, as the step holds them."""

    @property
    def axes(self) -> Tree:
        """Return the logical axes of the parameters, as the step holds them."""

    @property
    def stages(self) -> Stages | None:
        """Return how a pipeline holds the layers; None without a pipeline."""

    @property
    def folds(self) -> bool:
        """Return whether a step holds parameters in another form than a checkpoint."""

    def folded(self, tree: Tree) -> Tree:
        """Return parameters of a checkpoint, or a tree that has their names, as a step holds them."""

    def unfolded(self, tree: Tree) -> Tree:
        """Return parameters of a step, or a tree that has their names, as a checkpoint holds them."""

    @property
    def stage(self) -> int:
        """Return the ZeRO stage."""

    def init(self, key: Key[Array, ""]) -> tuple[Params, Params]:
        """Return (parameters at rest, variables)."""

    def weights(self, params: Params) -> Params:
        """Return the parameters in the compute dtype, gathered if that is done once per step."""

    def gradients(
        self, weights: Params, variables: Params, batch: Batch, step: Int[Array, ""], scale: Scale = None
    ) -> Summed:
        """Sum over all micro-batches and devices; `zero.cross` adds up gradients and aux, both in f32.

        Gradients are those of `scale` times the loss.
        """

    def evaluate(self, weights: Params, variables: Params, batch: Batch) -> tuple[Float[Array, ""], Sums]:
        """Return (summed loss, further sums)."""

    def count(self, batch: Batch) -> Int[Array, ""]:
        """Return the number that sums are divided by."""

    def positions(self, batch: Batch) -> int | None:
        """Return the number that gradients are divided by; None where it is that of the other sums."""

    @property
    def aux_abstract(self) -> Params:
        """Return the shapes of aux, stacked as the layers are."""

    @property
    def aux_places(self) -> Placements:
        """Return how aux are added up over the devices."""

    def reported(self, aux: Aux, batch: Batch) -> Further:
        """Return what is reported of aux of the step with `batch`."""

    def steered(self, params: Params, aux: Aux) -> Params:
        """Return the parameters, some of which have no gradient and move by aux, after a step."""
