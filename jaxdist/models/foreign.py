"""Take any `flax.nnx.Module` apart into pure functions over plain dicts; the module need not know of meshes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key

from jaxdist.models import dim_names, effects
from jaxdist.models.dim_names import Annotations
from jaxdist.parallel.foreign import Agreement, Mean, Outcome
from jaxdist.sharding import Params, Tree, Weighted, named

LossFunction = Callable[..., Any]
"""`loss_fn(module, batch)`, or with a third argument named `train`. Returns a mean over the rows of `batch`, or
(that mean, {name: another mean over rows}); or a pair (sum, weight), or {"loss": such a pair, name: another}."""


class WithAux(NamedTuple):
    """What a loss function returned that returns more than means: as other loss functions do, and arrays with rows."""

    returned: Any
    aux: Tree


@dataclass(frozen=True)
class Foreign:
    """A user's module taken apart once, into parameters and everything else that it holds (`variables`)."""

    make: Callable[[nnx.Rngs], nnx.Module]
    """Builds the module."""
    training: nnx.GraphDef
    """Its structure as it was built: what the constructor froze stays frozen."""
    evaluation: nnx.GraphDef
    """Its structure after `module.eval()`: no dropout, batch norm by its running statistics."""
    abstract: Params
    """Shape and dtype of every parameter."""
    axes: Params
    """Logical axes of every parameter, from metadata `axes` or Flax's annotations; None for a dim that has none."""
    variables: Params
    """Shape and dtype of batch statistics, keys and counts of random numbers, and the like."""
    variable_axes: Params
    """Logical axes of each of them; () for one without names, which lies whole on every device."""
    agreements: Params
    """How devices that have called the module on their own rows agree on each of the variables."""
    annotations: Annotations
    """Which of these axes Flax's annotations name."""

    def init(self, key: Key[Array, ""]) -> tuple[Params, Params]:
        """Return (parameters, variables) of a module made with `nnx.Rngs(key)`."""
        with dim_names.as_names():
            module = self.make(nnx.Rngs(key))
        return effects.params_of(module), effects.variables_of(module)

    def merge(self, params: Params, variables: Params, train: bool) -> nnx.Module:
        """Return the module with these arrays, a copy that may be changed."""
        return nnx.merge(self.training if train else self.evaluation, params, variables, copy=True)

    def cast(self, params: Params, dtype: DTypeLike) -> Params:
        """Return the parameters in `dtype`."""
        return jax.tree.map(lambda w: w.astype(dtype), params)

    def loss(self, loss_fn: LossFunction, params: Params, variables: Params, batch: Any, train: bool) -> Outcome:
        """Return (loss, variables after it, further means, arrays with rows) of the rows of `batch`.

        Raises `ValueError` where `loss_fn` returns no scalar, or leaves in the module what a step cannot keep.
        """
        options = {}
        if "train" in inspect.signature(loss_fn).parameters:
            options["train"] = train

        def make(params: Params) -> nnx.Module:
            return self.merge(params, variables, train)

        def use(module: nnx.Module) -> Any:
            return loss_fn(module, batch, **options)

        if not train:
            loss, further, aux = _result(use(make(params)))
            return loss, variables, further, aux
        returned, module = effects.call(make, params, use)
        loss, further, aux = _result(returned)
        after = effects.variables_of(module, self.variables)
        effects.check_variables(self.variables, after)
        return loss, after, further, aux


def describe(make: Callable[[nnx.Rngs], nnx.Module], prepare: Callable[[nnx.Module], None] | None = None) -> Foreign:
    """Describe the module that `make` builds; computes nothing and needs no device.

    `prepare` may change attributes of the module. Raises `ValueError` where `make` returns no module, or one that has
    no parameters or some that cannot be trained.
    """
    check_call("model_fn", make, ("rngs",))
    with dim_names.as_names():
        module = nnx.eval_shape(lambda: _module(make(nnx.Rngs(0))))
    found = dim_names.read(_variables(module, nnx.Variable))
    of_variables = jax.tree.map(dim_names.axes_of_any, nnx.state(module, nnx.Not(nnx.Param)), is_leaf=_is_variable)
    axes = jax.tree.map(dim_names.axes_of, nnx.state(module, nnx.Param), is_leaf=_is_variable)
    dim_names.remove(_variables(module, nnx.Variable))
    _decide_modes(module)
    # Without what `prepare` sets: evaluation calls the module on all rows, where no mesh axis has a name.
    evaluated = nnx.clone(module)
    evaluated.eval()
    if prepare is not None:
        prepare(module)
    abstract = effects.params_of(module)
    variables = effects.variables_of(module)
    if not jax.tree.leaves(abstract):
        raise ValueError(f"{type(module).__name__} has no parameters (nnx.Param); Linen modules need lazy_init first")
    for name, a in named(abstract).items():
        if not jnp.issubdtype(a.dtype, jnp.floating):
            raise ValueError(
                f"parameter {name} is of {a.dtype}, which cannot be trained; make it an nnx.Variable, or use floats"
            )
    agreements = jax.tree.map(_agreement, nnx.state(module, nnx.Not(nnx.Param)), is_leaf=_is_variable)
    return Foreign(
        make,
        nnx.graphdef(module),
        nnx.graphdef(evaluated),
        abstract,
        nnx.to_pure_dict(axes),
        variables,
        nnx.to_pure_dict(of_variables),
        nnx.to_pure_dict(agreements),
        found,
    )


def _variables(module: nnx.Module, kind: type[nnx.Variable]) -> list[nnx.Variable]:
    """Return the variables of this kind that a module holds."""
    return jax.tree.leaves(nnx.state(module, kind), is_leaf=_is_variable)


def _check_layers(module: nnx.Module) -> None:
    """Raise `ValueError` for layers of Flax whose every call assigns the parameters of another one."""
    for path, part in nnx.iter_modules(module):
        if isinstance(part, nnx.SpectralNorm | nnx.WeightNorm):
            kind = type(part).__name__
            raise ValueError(
                f"{'.'.join(map(str, path)) or 'the module'} is an nnx.{kind}, each call of which assigns normalized "
                f"parameters, from which the optimizer would go on; use flax.linen.{kind} through nnx.bridge.ToNNX, "
                f"which keeps parameters as they are, or normalize the weight where it is used"
            )


def _check_arrays(module: nnx.Module) -> None:
    """Raise `ValueError` for arrays that Flax takes for settings, and for variables that hold more than one array."""
    outside = effects.settings(module)
    for path, part in nnx.iter_graph(module):
        if isinstance(part, dict):
            outside |= {".".join(map(str, (*path, name))): value for name, value in part.items()}
    bare = []
    for name, value in outside.items():
        leaves = jax.tree.leaves(value, is_leaf=nnx.is_data)
        if any(isinstance(leaf, jax.Array) for leaf in leaves):
            bare.append(name)
    if bare:
        raise ValueError(
            f"{type(module).__name__} holds {', '.join(bare[:4])}, an array that is no nnx.Variable: make it one, or a "
            f"NumPy array"
        )
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        if _is_variable(variable) and not jnp.isscalar(variable.get_value()) and not hasattr(variable, "shape"):
            raise ValueError(
                f"{'.'.join(map(str, path))} holds a {type(variable.get_value()).__name__}; give each array a "
                f"variable of its own"
            )


def _decide_modes(module: nnx.Module) -> None:
    """Set the modes for training that the constructor has left open, as that of `nnx.MultiHeadAttention` does."""
    for _, part in nnx.iter_modules(module):
        for mode in effects.MODES:
            if vars(part).get(mode, True) is None:
                setattr(part, mode, False)


def synchronise(module: nnx.Module, axes: tuple[str, ...]) -> None:
    """Make batch norm take its statistics over the devices of these mesh axes, where each has its own rows.

    The module is changed in place. Without it, the statistics of one device alone would depend on the mesh.
    """
    for _, part in nnx.iter_modules(module):
        if isinstance(part, nnx.BatchNorm) and axes:
            part.axis_name = axes  # type: ignore[assignment]  # Flax passes it on to JAX, which takes a tuple too


def check_call(what: str, function: Any, arguments: tuple[str, ...]) -> None:
    """Raise `ValueError` unless `function` takes these arguments by position, and perhaps `train`."""
    call = f"{what}({', '.join(arguments)})"
    if isinstance(function, nnx.Module | flax.linen.Module):
        raise ValueError(
            f"{what} is a {type(function).__name__} that is built already; give a function {call} that builds it, so "
            f"that each device makes its own shards (Linen: nnx.bridge.ToNNX)"
        )
    if not callable(function):
        raise ValueError(f"{what} is {function!r}, which cannot be called; give a function {call}")
    signature = _signature(function)
    options = {}
    if "train" in signature.parameters:
        options["train"] = True
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        hint = "lambda rngs: Model(rngs=rngs)" if "rngs" in arguments else "lambda module, batch: ..."
        raise ValueError(f"{what} takes {signature}, but is called as {call}: {error}; wrap it: {hint}") from error


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, or of a class what its constructor takes."""
    if not isinstance(function, type):
        return inspect.signature(function)
    # Flax's metaclass takes anything.
    signature = inspect.signature(function.__init__)  # type: ignore[misc]  # of this very class
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def cast(tree: Tree, dtype: DTypeLike) -> Tree:
    """Cast the floats among the leaves to `dtype`."""

    def cast_float(a: jax.Array) -> jax.Array:
        return a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a

    return jax.tree.map(cast_float, tree)


def _module(made: Any) -> nnx.Module:
    """Return what `model_fn` returned; raise `ValueError` if it is no module that can be trained."""
    if not isinstance(made, nnx.Module):
        raise ValueError(f"model_fn returned {type(made).__name__}; return a flax.nnx.Module (Linen: nnx.bridge.ToNNX)")
    _check_layers(made)
    _check_arrays(made)
    return made


def _is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


def _agreement(variable: nnx.Variable | jax.ShapeDtypeStruct) -> Agreement:
    """Return how devices agree on a variable that each has computed from its own rows."""
    if jnp.issubdtype(variable.dtype, jax.dtypes.prng_key):
        return "key"
    if isinstance(variable, nnx.RngCount):
        return "count"
    if isinstance(variable, nnx.BatchStat) and jnp.issubdtype(variable.dtype, jnp.floating):
        return "mean"
    return "same"


def mean_over_rows(returned: Any) -> Float[Array, ""]:
    """Return what a loss function returned, if it is the mean alone; raise `ValueError` for anything else."""
    loss, further, _ = _result(returned)
    if further:
        raise ValueError(f"head returned further means, {', '.join(sorted(further))}; a pipeline sums the loss alone")
    if isinstance(loss, Weighted):
        raise ValueError("head returned a pair (sum, weight); in a pipeline return the mean over the rows")
    return loss


def with_aux(loss_fn: LossFunction) -> LossFunction:
    """Return a loss function that returns `WithAux`, of one that returns (what others return, arrays with rows)."""

    @wraps(loss_fn)
    def loss(*args: Any, **options: Any) -> WithAux:
        pair = loss_fn(*args, **options)
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(f"has_aux is true, but loss_fn returned {_kind(pair)}; return a pair (loss, aux)")
        return WithAux(*pair)

    return loss


def check_aux(aux: Tree, rows: int) -> None:
    """Raise `ValueError` for an array beside a loss over so many `rows` that does not have them."""
    for name, a in named(aux).items():
        if jnp.shape(a)[:1] != (rows,):
            raise ValueError(
                f"loss_fn returned aux of shape {jnp.shape(a)}{f' as {name}' if name else ''} for {rows} rows; give "
                f"arrays whose first dim counts the rows, and numbers as further means beside the loss"
            )


def _result(returned: Any) -> tuple[Mean, dict[str, Mean], Tree]:
    """Return (loss, further means, arrays with rows); raise `ValueError` for neither means nor pairs of sums."""
    if isinstance(returned, WithAux):
        mean, means, _ = _result(returned.returned)
        return mean, means, jax.tree.map(jnp.asarray, returned.aux)
    loss = returned
    further: Any = {}
    if isinstance(returned, dict):
        if "loss" not in returned:
            raise ValueError(f"loss_fn returned a dict of {', '.join(map(str, returned))}; name one of them 'loss'")
        loss = returned["loss"]
        further = {name: value for name, value in returned.items() if name != "loss"}
    elif isinstance(returned, tuple) and len(returned) == 2 and not _is_number(returned[1]):
        loss, further = returned
        if not isinstance(further, dict):
            raise ValueError(
                f"loss_fn returned a pair whose second part is {type(further).__name__}; return a dict of means, or "
                f"the weight by which a sum is to be divided"
            )
        if "loss" in further:
            raise ValueError("loss_fn names a further mean 'loss', as the loss itself is called; give it another name")
    return _mean("loss", loss), {name: _mean(name, value) for name, value in further.items()}, ()


def _mean(name: str, value: Any) -> Mean:
    """Return one mean, or pair (sum, weight), that a loss function has returned, as arrays."""
    if isinstance(value, tuple) and len(value) == 2:
        total, weight = value
        if not _is_number(weight) or jnp.iscomplexobj(weight):
            raise ValueError(f"loss_fn returned {name} with a weight of {_kind(weight)}; give the sum of the weights")
        if not _is_real(total):
            raise ValueError(
                f"loss_fn returned the sum of {name}: {_kind(total)}; return the sum over what counts, one real number"
            )
        total = jnp.asarray(total)
        # A weight is a number of the data. Its float has the precision of the sum.
        return Weighted(total, jax.lax.stop_gradient(jnp.asarray(weight).astype(total.dtype)))
    if not _is_real(value):
        raise ValueError(f"loss_fn returned {name}: {_kind(value)}; return the mean over the rows, one real number")
    return jnp.asarray(value)


def _is_real(value: Any) -> bool:
    return _is_number(value) and jnp.issubdtype(jnp.result_type(value), jnp.floating)


def _is_number(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic | float | int) and jnp.shape(value) == ()


def _kind(value: Any) -> str:
    """Return of which shape and dtype, or of which type, a value is."""
    if isinstance(value, jax.Array | np.ndarray | np.generic | float | int):
        return f"shape {jnp.shape(value)} and dtype {jnp.result_type(value)}"
    return type(value).__name__
