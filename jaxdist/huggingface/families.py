"""The tables of pieces: which tensors of Hugging Face's decoders make each of our parameters. No jax here.

A table is read in both directions: import fills our parameters from their tensors, export cuts theirs out of ours. The
letters of dims are those of `config.matmuls`, whose rows say what our weights are; here stand the names that theirs
have. Beside these letters, T is 3: query, key and value in one tensor of theirs too.

Query heads need no permutation: theirs are K outermost and then G, as ours are, and both turn halves of a head (RoPE).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxdist.config import ModelConfig, RequestError, matmuls
from jaxdist.config.matmuls import Matmul, Part

Place = tuple[int, ...]
"""The number of a layer, or those of a layer and of an expert in it; empty for a tensor beside the layers."""


@dataclass(frozen=True)
class Piece:
    """One tensor of theirs, or one for each layer, or one for each expert of each layer."""

    name: str
    """Its name in the file; `{layer}` and `{expert}` stand for numbers."""
    dims: tuple[str, ...]
    """The letters of each of its dims. "KGH" is one dim that counts K, G and H, the outermost first."""

    def name_at(self, place: Place) -> str:
        """Return its name in a layer and expert; beside the layers, or without experts, it has no such number."""
        layer, expert, *_ = (*place, 0, 0)
        return self.name.format(layer=layer, expert=expert)

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

    @property
    def stack(self) -> str:
        """The letters, the first ones, along which their tensors are stacked: L, or L and E, or none."""
        if not self.pieces:
            return ""
        return "".join(itertools.takewhile(lambda letter: letter in "LE", self.letters))

    def places(self, sizes: Mapping[str, int]) -> Iterator[Place]:
        """Yield the place of each tensor that a piece stands for; an empty one where it is a single tensor."""
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


def family_of(model: ModelConfig) -> Family:
    """Return the tensors of `model`. Raises `RequestError` for a family that Hugging Face's form is not known of."""
    if model.family == "llama":
        return _llama(model)
    if model.family == "moe":
        return _moe(model)
    if model.family == "gpt":
        return _gpt(model)
    raise RequestError(
        f"model.family is {model.family}, which has no form of Hugging Face here; llama, moe and gpt have one"
    )


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Return the size of each letter in the tables of `model`."""
    return {**matmuls.sizes_of(model), "T": 3}


LAYER = "model.layers.{layer}."
"""How the names begin of tensors in a layer of a decoder with rotary positions."""

ROTARY = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


def _llama(model: ModelConfig) -> Family:
    """Return the tensors of Llama, Mistral, Qwen 2 and Qwen 3."""
    names = {name: f"{LAYER}mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    leaves = [*_decoder(model), *_weights(model, "mlp", names)]
    return _with_output(model, leaves, "model.embed_tokens.weight", "model.", ROTARY)


def _moe(model: ModelConfig) -> Family:
    """Return the tensors of Mixtral, OLMoE and Qwen3-MoE: those of an expert are tensors of their own."""
    if model.qk_norm == "none":
        # Mixtral numbers the matrices.
        mlp = LAYER + "block_sparse_moe."
        matrices = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    else:
        mlp = LAYER + "mlp."
        matrices = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
    # None of these models has experts that all tokens share.
    unshared = model.model_copy(update={"shared_experts": 0})
    names = {part: f"{mlp}experts.{{expert}}.{matrix}" for part, matrix in matrices.items()}
    leaves = [
        *_decoder(model),
        *_weights(unshared, "mlp", {"gate": mlp + "gate", **names}),
        Leaf("blocks.mlp.balance", "LE", ()),
    ]
    return _with_output(model, leaves, "model.embed_tokens.weight", "model.", ROTARY)


def _decoder(model: ModelConfig) -> list[Leaf]:
    """Return the tensors of a decoder with rotary positions, without the MLPs and the output."""
    attention = LAYER + "self_attn."
    names = {name: attention + name for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    leaves = [
        _one("table", "VD", "model.embed_tokens.weight", ("V", "D")),
        _one("norm.scale", "D", "model.norm.weight", ("D",)),
        _one("blocks.norm1.scale", "LD", LAYER + "input_layernorm.weight", ("D",)),
        _one("blocks.norm2.scale", "LD", LAYER + "post_attention_layernorm.weight", ("D",)),
        # Written files have biases last.
        *sorted(_weights(model, "attention", names), key=lambda leaf: leaf.path.endswith("_bias")),
    ]
    norms = (attention + "q_norm.weight", attention + "k_norm.weight")
    if model.qk_norm == "head":
        leaves.append(_one("blocks.attention.q_norm.scale", "LH", norms[0], ("H",)))
        leaves.append(_one("blocks.attention.k_norm.scale", "LH", norms[1], ("H",)))
    elif model.qk_norm == "full":
        pieces = (Piece(norms[0], ("KGH",)), Piece(norms[1], ("KH",)))
        leaves.append(Leaf("blocks.attention.qk_norm.scale", "LKCH", pieces))
    return leaves


def _weights(model: ModelConfig, module: str, names: Mapping[str, str], inputs_first: bool = False) -> list[Leaf]:
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
        leaves.append(Leaf(f"blocks.{matmul.path}", "L" + letters, of_weight))
        if matmul.bias:
            of_bias = tuple(Piece(f"{name}.bias", (made,)) for name, made in pieces.items())
            leaves.append(Leaf(f"blocks.{matmul.path}_bias", "L" + outputs, of_bias))
    return leaves


def _outputs(matmul: Matmul, part: Part) -> str:
    """Return the letters of what a part makes: query heads are K and then G where key/value heads are a dim of ours."""
    return part.outputs.replace("N", "KG") if "K" in matmul.letters else part.outputs


def _gpt(model: ModelConfig) -> Family:
    """Return the tensors of GPT-2, whose weights are [in, out] as ours are (`Conv1D`)."""
    layer = "transformer.h.{layer}."
    attention = {"attention.qkv": layer + "attn.c_attn", "o_proj": layer + "attn.c_proj"}
    mlp = {"up_proj": layer + "mlp.c_fc", "down_proj": layer + "mlp.c_proj"}
    leaves = [
        _one("table", "VD", "transformer.wte.weight", ("V", "D")),
        _one("positions", "SD", "transformer.wpe.weight", ("S", "D")),
        *_layer_norm("norm", "D", "transformer.ln_f"),
        *_layer_norm("blocks.norm1", "LD", layer + "ln_1"),
        *_layer_norm("blocks.norm2", "LD", layer + "ln_2"),
        *_weights(model, "attention", attention, inputs_first=True),
        *_weights(model, "mlp", mlp, inputs_first=True),
    ]
    # Masks of attention, one a layer.
    ignored = re.compile(r"(.*\.)?attn\.(masked_)?bias")
    return _with_output(model, leaves, "transformer.wte.weight", "transformer.", ignored)


def _layer_norm(path: str, letters: str, name: str) -> tuple[Leaf, Leaf]:
    """Return the scale and the bias of a LayerNorm."""
    return (
        _one(f"{path}.scale", letters, f"{name}.weight", ("D",)),
        _one(f"{path}.bias", letters, f"{name}.bias", ("D",)),
    )


def _with_output(model: ModelConfig, leaves: list[Leaf], table: str, prefix: str, ignored: re.Pattern[str]) -> Family:
    """Return the family with the output projection, which is the `table` itself where it is tied."""
    output = "lm_head.weight"
    if model.tied:
        return Family(tuple(leaves), {output: table}, prefix, ignored)
    return Family((*leaves, _one("output", "VD", output, ("V", "D"))), {}, prefix, ignored)


def _one(path: str, letters: str, name: str, dims: tuple[str, ...]) -> Leaf:
    """Return a parameter that is one tensor of theirs."""
    return Leaf(path, letters, (Piece(name, dims),))
