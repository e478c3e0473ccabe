"""Define what a parameter is to an update rule, and what is known of an update rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import optax

Roles = dict[str, Any]
"""A `Role` for each parameter, nested as the parameters are."""


class Knobs(Protocol):
    """What rules and schedules read of `OptimizerConfig`, which imports the tables and is not imported here."""

    @property
    def learning_rate(self) -> float:
        """Return the peak learning rate."""

    @property
    def warmup(self) -> int:
        """Return the steps of the warm-up."""

    @property
    def final(self) -> float:
        """Return the learning rate at the end, as a fraction of the peak."""

    @property
    def beta1(self) -> float:
        """Return the decay of the first moment."""

    @property
    def beta2(self) -> float:
        """Return the decay of the second moment."""

    @property
    def weight_decay(self) -> float:
        """Return the decoupled weight decay."""

    def decay_steps(self, steps: int) -> int:
        """Return how many of the last of `steps` steps decay in an open-ended schedule."""


Transformation = Callable[[Knobs, "optax.Schedule", Roles], "optax.GradientTransformation"]
"""(knobs, learning rate by update, roles) -> update rule."""


@dataclass(frozen=True)
class Matrices:
    """How an array of one layer is matrices: its dims are numbered without those that count layers and experts."""

    experts: int
    """How many dims in front of it count experts, each of which has matrices of its own."""
    inputs: tuple[int, ...]
    """The dims that are the rows together; all others are the columns."""
    fused: int | None
    """The dim along which several weights lie side by side; each of them is a matrix by itself."""
    places: tuple[int, ...]
    """How many places along that dim each of these weights has."""

    def sizes(self, shape: tuple[int, ...]) -> list[tuple[int, int]]:
        """Return the (rows, columns) of each weight in an array of one layer, and of one expert, of `shape`."""
        rows = math.prod(shape[dim] for dim in self.inputs)
        if self.fused is None:
            return [(rows, math.prod(shape) // rows)]
        of_one = math.prod(shape) // rows // shape[self.fused]
        return [(rows, of_one * places) for places in self.places]


@dataclass(frozen=True)
class Role:
    """What a parameter is to an update rule, wherever it lies."""

    stacked: int = 0
    """How many leading dims count layers."""
    decays: bool = False
    """Whether weight decay is for it: it is a matrix, layers aside, and no scale or bias."""
    steered: bool = False
    """Whether a rule of the model moves it, in the place of a gradient."""
    matrices: Matrices | None = None
    """How it is matrices of layers; None: it is none, as tables, norms and biases are none."""
    trained: bool = True
    """Whether a step changes it; others are frozen."""
    layers: tuple[int, ...] = ()
    """Which layer each place of the stacked dims has, row by row, where some have none; empty: they are in order."""
    added: int = 0
    """How many places at the end of its first dim the mesh has added; they are zero, and no mean counts them."""

    @property
    def differentiated(self) -> bool:
        """Whether it has a gradient, by which the update rule moves it."""
        return self.trained and not self.steered


@dataclass(frozen=True)
class OfMatrices:
    """What a rule asks that reads matrices of layers as wholes, as they are in no device's part."""

    moments: tuple[str, ...]
    """The arrays that it keeps for each of them, as `UpdateRule.moments` are for others."""
    flops: Callable[[int, int], int]
    """(rows, columns) -> FLOPs of the update of one matrix."""


@dataclass(frozen=True)
class Mean:
    """A mean that an update takes over some dims of a parameter: where the mesh splits one of them, an all-reduce."""

    over: tuple[int, ...]
    """The dims of which the mean is taken."""
    dims: tuple[int, ...]
    """The dims of the parameter that the mean has too."""
    kept: bool = False
    """Whether it stays in the state, in f32."""


@dataclass(frozen=True)
class UpdateRule:
    """A row of the optimizer table.

    Its state lies where the parameters lie. An update sends nothing, and takes the time of reading and writing what it
    changes, but for what `matrices` and `means` say.
    """

    transformation: Transformation
    moments: tuple[str, ...]
    """The arrays that it keeps for each parameter that it moves, of its shape, by their names in the state of
    the transformation. They are f32 in an update, and between updates what `optimizer.moments` says."""
    counters: int
    """Whole numbers that it keeps: its counts of updates, that of the learning-rate schedule among them."""
    betas: tuple[str, ...]
    """The knobs by which its moments decay."""
    squares: tuple[str, ...] = ()
    """Those of its moments that are means of squares."""
    matrices: OfMatrices | None = None
    """What it does otherwise with the matrices of layers; None: an update of a number needs that number alone."""

    means: Callable[[Role, int], tuple[Mean, ...]] | None = None
    """(role, dims) -> the means that an update takes of a parameter; None: it takes none."""

    def reads_whole(self, role: Role) -> bool:
        """Return whether an update of a parameter reads its matrices as wholes."""
        return self.matrices is not None and role.matrices is not None and role.differentiated

    def means_of(self, role: Role, dims: int) -> tuple[Mean, ...]:
        """Return the means that an update takes of a parameter with so many dims."""
        return self.means(role, dims) if self.means is not None and role.differentiated else ()

    def moments_of(self, role: Role) -> int:
        """Return how many moments a parameter has."""
        if self.matrices is not None and self.reads_whole(role):
            return len(self.matrices.moments)
        return len(self.moments) if role.differentiated else 0


def decaying(roles: Roles) -> Any:
    """Return which parameters decay, as a mask of optax."""
    import jax

    return jax.tree.map(lambda role: role.decays, roles)
