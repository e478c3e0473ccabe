"""Call any function of a module and arrays on the mesh: predictions, sampling, metrics of one's own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import jax
import numpy as np

from jaxdist.models import Params
from jaxdist.models.foreign import Foreign
from jaxdist.sharding import BATCH, Tree
from jaxdist.training.engine import Engine
from jaxdist.training.forward.module import ModuleForward
from jaxdist.training.forward.module_pipeline import ModulePipelineForward


class Application:
    """Calls functions of a module on the mesh; what is compiled for one stays."""

    def __init__(self, engine: Engine, model: Foreign):
        """Compile nothing yet."""
        self._engine = engine
        self._model = model
        self._compiled: dict[Hashable, tuple[Callable[..., Any], Any]] = {}
        """Each function that was called, which is kept alive, and its compiled form."""

    def __call__(
        self, fn: Callable[..., Any], params: Params, variables: Params, args: tuple[Any, ...], train: bool
    ) -> Any:
        """Return `fn(module, *args)`; call under `jax.set_mesh`."""
        rows = self._rows(args)
        key = (_identity(fn), rows, train)
        if key not in self._compiled:
            self._compiled[key] = fn, jax.jit(self._function(fn, rows, train))
        _, compiled = self._compiled[key]
        return compiled(params, variables, jax.tree.map(lambda a: self._put(a, rows), args))

    def _rows(self, args: tuple[Any, ...]) -> int | None:
        """Return the leading dim of the first array, if the mesh divides it: the rows of what lies alike."""
        sizes = (np.shape(a)[0] for a in jax.tree.leaves(args) if np.ndim(a))
        rows = next(sizes, None)
        return rows if rows and rows % self._engine.layout.ranks == 0 else None

    def _dims(self, shape: tuple[int, ...], rows: int | None) -> tuple[str, ...]:
        """Return the logical axes of an array of this shape: of its first dim, or of none."""
        return (BATCH,) if rows is not None and shape[:1] == (rows,) else ()

    def _put(self, a: Any, rows: int | None) -> jax.Array:
        return self._engine.put(a, self._dims(np.shape(a), rows))

    def _function(self, fn: Callable[..., Any], rows: int | None, train: bool) -> Callable[..., Any]:
        forward = self._engine.step.forward
        assert isinstance(forward, ModuleForward | ModulePipelineForward)

        def call(params: Params, variables: Params, args: tuple[Any, ...]) -> Any:
            return fn(self._model.merge(params, variables, train), *args)

        def function(params: Params, variables: Params, args: tuple[Any, ...]) -> Any:
            # How the results lie has to be said before the call.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                found = jax.eval_shape(call, self._model.abstract, self._model.variables, _shapes(args))
            layout = self._engine.layout
            out = jax.tree.map(lambda a: layout.spec(self._dims(a.shape, rows)), found)
            return forward.apply(call, params, variables, args, out)

        return function


def _shapes(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tree)


def _identity(fn: Callable[..., Any]) -> Hashable:
    """Return what makes a function the same: a lambda that is written in a loop is not another one in each round.

    Objects that it refers to and that have no hash are told apart by where they are, while the function lives.
    """
    if not isinstance(fn, FunctionType):
        return fn
    values = [cell.cell_contents for cell in fn.__closure__ or ()]
    values += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    return fn.__code__, *map(_hashable, values)


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return type(value), id(value)
    return type(value), value
