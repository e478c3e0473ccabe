"""Quantize the base of adapters as it is read: a parameter at a time, or, where it is merged, a layer at a time.

What is quantized is the weight in the dtype of the parameters beside it, bfloat16: most files have it in that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdist.config import ModelConfig
from jaxdist.config.matmuls import STREAM, matmuls_of
from jaxdist.config.stacks import path_to, stacks_of
from jaxdist.huggingface.readable import Block, Readable, Region, read, spans_of
from jaxdist.models import Params
from jaxdist.models.quantization import FORMS
from jaxdist.sharding import name_of, named

if TYPE_CHECKING:
    from jaxdist.training.run import Run


def quantized_dims(model: ModelConfig) -> dict[str, int]:
    """Return the dim along which blocks lie, by the paths of the weights that `model` holds quantized."""
    if not model.stored_form:
        return {}
    dims = {}
    for name, stack in stacks_of(model).items():
        for matmul in matmuls_of(stack).values():
            # Files have the layers stacked.
            dims[path_to(name) + matmul.path] = 1 + matmul.letters.index(STREAM)
    return dims


@dataclass
class Holding:
    """How a run holds the frozen parameters that it reads; call all of it under `jax.set_mesh`."""

    run: Run
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of each weight that was quantized: the sums of the squares of what it is off by, and of its numbers."""

    @cached_property
    def to_read(self) -> Params:
        """Shapes, dtypes and shardings of the parameters as they are read."""
        return self.run.as_read.engine.abstract_frozen()

    @cached_property
    def _dims(self) -> dict[str, int]:
        return quantized_dims(self.run.config.model)

    @cached_property
    def _specs(self) -> Any:
        """How the arrays lie that a run holds, in the tree of its parameters."""
        return jax.tree.map(lambda a: a.sharding.spec, self.run.engine.abstract_frozen())

    def hold(self, path: tuple[Any, ...], w: jax.Array) -> Any:
        """Return what a run holds of the parameter at `path`: an array, or a dict of those that hold it quantized."""
        name = name_of(path)
        if name not in self._dims:
            return w
        specs = self._specs
        for key in path:
            specs = specs[key.key]
        dim = self._dims[name]
        form = FORMS[self.run.config.model.stored_form]

        def quantized(w: jax.Array) -> tuple[Any, jax.Array]:
            w = w.astype(jnp.float32)
            arrays = form.encode(jnp, w, dim)
            off = form.decode(jnp, arrays, dim) - w
            return arrays, jnp.stack([jnp.sum(jnp.square(off)), jnp.sum(jnp.square(w))])

        # Inside `auto_axes` the numbers may lie in any way: only the results get a layout.
        sums = self.run.layout.spec([None])
        arrays, squares = jax.jit(jax.sharding.auto_axes(quantized, out_sharding=(specs, sums)))(w)
        off, whole = jax.device_get(squares)
        self.errors[name] = float(off), float(whole)
        return arrays

    def report(self) -> str:
        """Return what a reader should know of the quantization; empty where nothing was quantized."""
        if not self.errors:
            return ""
        relative = {name: _relative(*sums) for name, sums in self.errors.items()}
        worst = max(relative, key=lambda name: relative[name])
        off, whole = np.sum(list(self.errors.values()), axis=0)
        held = named(self.run.model.abstract)
        read = named(self.to_read)
        bits = (
            8
            * sum(a.size * a.dtype.itemsize for name, a in held.items() if name.rpartition(".")[0] in self.errors)
            / sum(read[name].size for name in self.errors)
        )
        return (
            f"quantized to {self.run.config.model.stored_form}, {bits:.2f} bits a number: off by "
            f"{_relative(off, whole):.2%} (root mean square), most in {worst} ({relative[worst]:.2%})"
        )


def _relative(off: float, whole: float) -> float:
    """Return the root mean square of what numbers are off by, over that of the numbers."""
    return (off / whole) ** 0.5 if whole else 0.0


@dataclass(frozen=True, eq=False)
class AsHeld:
    """A weight of the base as a run computes with it: the numbers that its quantized form stands for, in float32."""

    array: Readable
    model: ModelConfig
    dim: int
    """Along which blocks lie."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole weight."""
        return self.array.shape

    @property
    def dtype(self) -> DTypeLike:
        """The dtype of what is quantized."""
        return jnp.dtype(self.model.dtype_at_rest)

    def blocks(self, region: Region) -> Iterator[Block]:
        """Yield a region layer by layer; what is quantized together is read with it."""
        form = FORMS[self.model.stored_form]
        spans = spans_of(region, self.shape)
        own = slice(*spans[self.dim])
        first, last = spans[0]
        for layer in range(first, last):
            part = [slice(*span) for span in spans]
            part[0] = slice(layer, layer + 1)
            part[self.dim] = slice(0, self.shape[self.dim])
            w = read(self.array, tuple(part)).astype(self.dtype).astype(np.float32)
            numbers = form.decode(np, form.encode(np, w, self.dim), self.dim)
            place = [slice(0, stop - start) for start, stop in spans]
            place[0] = slice(layer - first, layer - first + 1)
            cut = [slice(None)] * w.ndim
            cut[self.dim] = own
            yield tuple(place), numbers[tuple(cut)]


def as_held(model: ModelConfig, name: str, array: Readable) -> Readable:
    """Return a parameter of the base as a run of `model` computes with it, but for rounding to a dtype."""
    dim = quantized_dims(model).get(name)
    return array if dim is None else AsHeld(array, model, dim)
