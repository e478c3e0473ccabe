"""The tables of pieces: which tensors of Hugging Face's decoders make each of our parameters. No jax here.

Here stands what several types have in common; what one type calls otherwise stands in its own file of `model_types`,
and `type_choice` says which type a model has.

A table is read in both directions: import fills our parameters from their tensors, export cuts theirs out of ours. The
letters of dims are those of `config.matmuls`, whose rows say what our weights are; here stand the names that theirs
have. Beside these letters, T is 3: query, key and value in one tensor of theirs too; and P is 2: gate and up.

Query heads need no permutation: theirs are K outermost and then G, as ours are, and both turn halves of a head (RoPE).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jaxdist.config import ModelConfig, matmuls
from jaxdist.config.matmuls import Matmul, Part

Place = tuple[int, ...]
"""The number of a layer, or those of a layer and of an expert in it; empty for a tensor beside the layers."""


def name_at(name: str, place: Place) -> str:
    """Return a name of theirs with the numbers of a layer and expert in the place of `{layer}` and `{expert}`."""
    layer, expert, *_ = (*place, 0, 0)
    return name.format(layer=layer, expert=expert)


@dataclass(frozen=True)
class Piece:
    """One tensor of theirs, or one for each layer, or one for each expert of each layer."""

    name: str
    """Its name in the file; `{layer}` and `{expert}` stand for numbers."""
    dims: tuple[str, ...]
    """The letters of each of its dims. "KGH" is one dim that counts K, G and H, the outermost first."""
    first: int = 0
    """The number in their model of the layer at place 0."""
    exact: bool = False
    """Whether it is written in float32, whatever the dtype of the others is."""

    def name_at(self, place: Place) -> str:
        """Return its name in a layer and expert; beside the layers, or without experts, it has no such number."""
        layer, *rest = place or (0,)
        return name_at(self.name, (self.first + layer, *rest))

    @property
    def names(self) -> str:
        """All its names, with a star for each number."""
        return self.name.format(layer="*", expert="*")

    @property
    def letters(self) -> str:
        """The letters of all its dims: with one dim for each of them, its numbers lie in the same order."""
        return "".join(self.dims)


@dataclass(frozen=True)
class Leaf:
    """One of our parameters, and the tensors of theirs that lie side by side along its C, if it has one."""

    path: str
    """Its path in our tree of parameters, such as `blocks.mlp.down`."""
    letters: str
    """The letters of its dims; L comes first where it holds all layers."""
    pieces: tuple[Piece, ...]
    """One tensor of theirs; or several, which are at C = 0, 1, ...; one with a G takes that many places.

    None for a parameter that their model does not have: there it is zero.
    """
    own: Mapping[str, int] = field(default_factory=dict)
    """The sizes of letters that are not those of the table."""

    def sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the size of each letter, given those of the table."""
        return {**sizes, **self.own}

    @property
    def stack(self) -> str:
        """The letters, the first ones, along which their tensors are stacked: L, or L and E, or none."""
        if not self.pieces:
            return ""
        of_tensor = self.pieces[0].letters
        return "".join(itertools.takewhile(lambda letter: letter in "LE" and letter not in of_tensor, self.letters))

    def places(self, sizes: Mapping[str, int]) -> Iterator[Place]:
        """Yield the place of each tensor that a piece stands for; an empty one where it is a single tensor."""
        sizes = self.sizes(sizes)
        yield from itertools.product(*(range(sizes[letter]) for letter in self.stack))


@dataclass(frozen=True)
class Family:
    """The tensors of a model."""

    leaves: tuple[Leaf, ...]
    copies: dict[str, str]
    """Tensors that a file may hold though the model has them by another name: a tied output, and what it must equal."""
    prefix: str
    """The beginning of names that is missing where the file was written without the output."""
    ignored: re.Pattern[str]
    """Names of tensors that are computed, and not learned: older files hold them."""
    constants: Mapping[str, float] = field(default_factory=dict)
    """Tensors of one number in each layer that is a constant here, and the number."""
    fused: Mapping[str, str] = field(default_factory=dict)
    """The tensor of theirs in which others lie one after the other, as rows, by the names of these."""

    def constants_of(self, model: ModelConfig) -> dict[str, float]:
        """Return these tensors of all layers by their names."""
        return {
            name.format(layer=layer): number for layer in range(model.layers) for name, number in self.constants.items()
        }


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Return the size of each letter in the tables of `model`."""
    return {**matmuls.sizes_of(model), "T": 3, "P": 2}


LAYER = "model.layers.{layer}."
"""How the names begin of tensors in a layer of a decoder with rotary positions."""

ROTARY = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def llama(model: ModelConfig) -> Family:
    """Return the tensors of Llama, and of the types whose layers are Llama's with other values of knobs."""
    names = {name: f"{LAYER}mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    return with_output(model, [*decoder(model), *weights(model, "mlp", names)])


def experts(model: ModelConfig, mlp: str, matrices: Mapping[str, str], shared: str) -> Iterator[Leaf]:
    """Yield the weights of a router, of its experts, and of those that all tokens share, if there are any.

    `matrices` are their names of the parts of an expert, and `shared` is what they call the experts of all tokens.
    """
    beside = {name: mlp + name for name in ("gate", "shared_expert_gate")}
    of_expert = {part: f"{mlp}experts.{{expert}}.{matrix}" for part, matrix in matrices.items()}
    of_shared = {part: f"{mlp}{shared}.{matrix}" for part, matrix in matrices.items()}
    # The parts of both have the same names.
    yield from (leaf for leaf in weights(model, "mlp", {**beside, **of_expert}) if "shared" not in leaf.path)
    yield from (leaf for leaf in weights(model, "mlp", {**beside, **of_shared}) if "shared" in leaf.path)


def decoder(model: ModelConfig, names_of_norms: Mapping[str, str] | None = None) -> list[Leaf]:
    """Return the tensors of a decoder with rotary positions, without the MLPs and the output.

    `names_of_norms` are described at `norms`.
    """
    attention = LAYER + "self_attn."
    names = {name: attention + name for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    leaves = [
        one("table", "VD", "model.embed_tokens.weight", ("V", "D")),
        *norm(model, "norm", "D", "model.norm"),
        *norms(model, names_of_norms),
        # Written files have biases last.
        *sorted(weights(model, "attention", names), key=lambda leaf: leaf.path.endswith("_bias")),
    ]
    of_heads = (attention + "q_norm.weight", attention + "k_norm.weight")
    if model.qk_norm == "head":
        leaves.append(one("blocks.attention.q_norm.scale", "LH", of_heads[0], ("H",)))
        leaves.append(one("blocks.attention.k_norm.scale", "LH", of_heads[1], ("H",)))
    elif model.qk_norm == "full":
        pieces = (Piece(of_heads[0], ("KGH",)), Piece(of_heads[1], ("KH",)))
        leaves.append(Leaf("blocks.attention.qk_norm.scale", "LKCH", pieces))
    return leaves


NORMS = {
    "before": {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"},
    "after": {"norm1": "post_attention_layernorm", "norm2": "post_feedforward_layernorm"},
    "both": {
        "norm1": "input_layernorm",
        "norm1_after": "post_attention_layernorm",
        "norm2": "pre_feedforward_layernorm",
        "norm2_after": "post_feedforward_layernorm",
    },
}
"""The names of norms in a layer by where they stand (`model.norms`), and by ours."""


def norms(model: ModelConfig, names: Mapping[str, str] | None = None) -> Iterator[Leaf]:
    """Yield the norms over the residual stream in a layer, which theirs calls by `names`; None: as most types do."""
    for ours, theirs in (names or NORMS[model.norms]).items():
        yield from norm(model, f"blocks.{ours}", "LD", LAYER + theirs)


def norm(model: ModelConfig, path: str, letters: str, name: str) -> Iterator[Leaf]:
    """Yield the scale of a norm over the residual stream, and the bias where it is a LayerNorm."""
    yield one(f"{path}.scale", letters, f"{name}.weight", ("D",))
    if model.norm_form == "layer":
        yield one(f"{path}.bias", letters, f"{name}.bias", ("D",))


def weights(model: ModelConfig, module: str, names: Mapping[str, str], inputs_first: bool = False) -> list[Leaf]:
    """Return the weights and biases of a `module` of our layers.

    `names` says how their names begin, by that of a part, or by the path of a weight whose parts are one tensor of
    theirs too. Their weights are [out, in], or with `inputs_first` [in, out].
    """
    leaves = []
    for matmul in matmuls.matmuls_of(model).values():
        if not matmul.path.startswith(f"{module}."):
            continue
        letters = matmul.letters
        outputs = matmul.outputs
        if matmul.path in names:
            letters = letters.replace("C", "T")
            outputs = outputs.replace("C", "T")
            pieces = {names[matmul.path]: outputs}
        else:
            pieces = {names[part.name]: _outputs(matmul, part) for part in matmul.parts}
        ends = [(made, matmul.inputs) for made in pieces.values()]
        dims = [(into, made) if inputs_first else (made, into) for made, into in ends]
        of_weight = tuple(Piece(f"{name}.weight", dim) for name, dim in zip(pieces, dims, strict=True))
        leaves.append(Leaf(f"blocks.{matmul.path}", "L" + letters, of_weight, matmul.sizes))
        if matmul.bias:
            of_bias = tuple(Piece(f"{name}.bias", (made,)) for name, made in pieces.items())
            leaves.append(Leaf(f"blocks.{matmul.path}_bias", "L" + outputs, of_bias))
    return leaves


def _outputs(matmul: Matmul, part: Part) -> str:
    """Return the letters of what a part makes: query heads are K and then G where key/value heads are a dim of ours."""
    return part.outputs.replace("N", "KG") if "K" in matmul.letters else part.outputs


def with_output(
    model: ModelConfig,
    leaves: list[Leaf],
    table: str = "model.embed_tokens.weight",
    prefix: str = "model.",
    ignored: re.Pattern[str] = ROTARY,
    output: str = "lm_head.weight",
) -> Family:
    """Return the family with the `output` projection, which is the `table` itself where it is tied."""
    if model.tied:
        return Family(tuple(leaves), {output: table}, prefix, ignored)
    return Family((*leaves, one("output", "VD", output, ("V", "D"))), {}, prefix, ignored)


def one(path: str, letters: str, name: str, dims: tuple[str, ...]) -> Leaf:
    """Return a parameter that is one tensor of theirs."""
    return Leaf(path, letters, (Piece(name, dims),))
