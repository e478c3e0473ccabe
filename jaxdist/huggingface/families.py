"""The tables of pieces: which tensors of Hugging Face's decoders make each of our parameters. No jax here.

A table is read in both directions: import fills our parameters from their tensors, export cuts theirs out of ours. The
letters of dims are those of `sharding.LETTERS`. Beside them, C counts the tensors of theirs that lie side by side in
one of our arrays, G the query heads that share a key/value head (GQA), and T is 3: query, key and value
in one tensor of theirs too.

Query heads need no permutation: theirs are K outermost and then G, as ours are, and both turn halves of a head (RoPE).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxdist.config import ModelConfig, RequestError


@dataclass(frozen=True)
class Piece:
    """One tensor of theirs, or one for each layer."""

    name: str
    """Its name in the file; `{layer}` stands for the number of the layer."""
    dims: tuple[str, ...]
    """The letters of each of its dims. "KGH" is one dim that counts K, G and H, the outermost first."""

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
    """One tensor of theirs; or several, which are at C = 0, 1, ...; one with a G takes that many places."""

    @property
    def stacked(self) -> bool:
        """Whether the parameter holds all layers."""
        return self.letters.startswith("L")


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
    if model.family == "gpt":
        return _gpt(model)
    raise RequestError(
        f"model.family is {model.family}, which has no form of Hugging Face here; llama and gpt have one"
    )


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Return the size of each letter in the tables of `model`."""
    group = model.heads // model.key_value_heads
    return {
        "L": model.layers,
        "D": model.embed,
        "N": model.heads,
        "K": model.key_value_heads,
        "G": group,
        "H": model.head_size,
        "F": model.mlp_size,
        "V": model.vocab,
        "S": model.position_rows,
        "T": 3,
    }


def _llama(model: ModelConfig) -> Family:
    """Return the tensors of Llama, Mistral, Qwen 2 and Qwen 3."""
    layer = "model.layers.{layer}."
    attention = layer + "self_attn."
    mlp = layer + "mlp."
    leaves = [
        _one("table", "VD", "model.embed_tokens.weight", ("V", "D")),
        _one("norm.scale", "D", "model.norm.weight", ("D",)),
        _one("blocks.norm1.scale", "LD", layer + "input_layernorm.weight", ("D",)),
        _one("blocks.norm2.scale", "LD", layer + "post_attention_layernorm.weight", ("D",)),
        Leaf("blocks.attention.qkv", "LDKCH", _projections(attention, "weight", ("D",))),
        _one("blocks.attention.out", "LNHD", attention + "o_proj.weight", ("D", "NH")),
        Leaf(
            "blocks.mlp.gate_up",
            "LDCF",
            (Piece(mlp + "gate_proj.weight", ("F", "D")), Piece(mlp + "up_proj.weight", ("F", "D"))),
        ),
        _one("blocks.mlp.down", "LFD", mlp + "down_proj.weight", ("D", "F")),
    ]
    if model.qkv_bias:
        leaves.append(Leaf("blocks.attention.qkv_bias", "LKCH", _projections(attention, "bias", ())))
    norms = (attention + "q_norm.weight", attention + "k_norm.weight")
    if model.qk_norm == "head":
        leaves.append(_one("blocks.attention.q_norm.scale", "LH", norms[0], ("H",)))
        leaves.append(_one("blocks.attention.k_norm.scale", "LH", norms[1], ("H",)))
    elif model.qk_norm == "full":
        pieces = (Piece(norms[0], ("KGH",)), Piece(norms[1], ("KH",)))
        leaves.append(Leaf("blocks.attention.qk_norm.scale", "LKCH", pieces))
    ignored = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
    return _with_output(model, leaves, "model.embed_tokens.weight", "model.", ignored)


def _projections(attention: str, kind: str, inputs: tuple[str, ...]) -> tuple[Piece, ...]:
    """Return the tensors that make queries, keys and values: weights, with the dim of their `inputs`, or biases."""
    return (
        Piece(f"{attention}q_proj.{kind}", ("KGH", *inputs)),
        Piece(f"{attention}k_proj.{kind}", ("KH", *inputs)),
        Piece(f"{attention}v_proj.{kind}", ("KH", *inputs)),
    )


def _gpt(model: ModelConfig) -> Family:
    """Return the tensors of GPT-2, whose weights are [in, out] as ours are (`Conv1D`)."""
    layer = "transformer.h.{layer}."
    attention = layer + "attn."
    mlp = layer + "mlp."
    leaves = [
        _one("table", "VD", "transformer.wte.weight", ("V", "D")),
        _one("positions", "SD", "transformer.wpe.weight", ("S", "D")),
        *_layer_norm("norm", "D", "transformer.ln_f"),
        *_layer_norm("blocks.norm1", "LD", layer + "ln_1"),
        *_layer_norm("blocks.norm2", "LD", layer + "ln_2"),
        _one("blocks.attention.qkv", "LDTNH", attention + "c_attn.weight", ("D", "TNH")),
        _one("blocks.attention.qkv_bias", "LTNH", attention + "c_attn.bias", ("TNH",)),
        _one("blocks.attention.out", "LNHD", attention + "c_proj.weight", ("NH", "D")),
        _one("blocks.attention.out_bias", "LD", attention + "c_proj.bias", ("D",)),
        _one("blocks.mlp.up", "LDF", mlp + "c_fc.weight", ("D", "F")),
        _one("blocks.mlp.up_bias", "LF", mlp + "c_fc.bias", ("F",)),
        _one("blocks.mlp.down", "LFD", mlp + "c_proj.weight", ("F", "D")),
        _one("blocks.mlp.down_bias", "LD", mlp + "c_proj.bias", ("D",)),
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
