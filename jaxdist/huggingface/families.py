"""The tables of pieces: which tensors of Hugging Face's decoders make each of our parameters. No jax here.

A table is read in both directions: import fills our parameters from their tensors, export cuts theirs out of ours. The
letters of dims are those of `config.matmuls`, whose rows say what our weights are; here stand the names that theirs
have. Beside these letters, T is 3: query, key and value in one tensor of theirs too; and P is 2: gate and up.

Query heads need no permutation: theirs are K outermost and then G, as ours are, and both turn halves of a head (RoPE).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from jaxdist.config import ModelConfig, RequestError, matmuls
from jaxdist.config.activation_numbers import XIELU_BETA, XIELU_EPS
from jaxdist.config.matmuls import Matmul, Part
from jaxdist.config.stacks import first_layers, path_to, stacks_of

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

    def constants_of(self, model: ModelConfig) -> dict[str, float]:
        """Return these tensors of all layers by their names."""
        return {
            name.format(layer=layer): number for layer in range(model.layers) for name, number in self.constants.items()
        }


def family_of(model: ModelConfig) -> Family:
    """Return the tensors of `model`. Raises `RequestError` for a family that Hugging Face's form is not known of."""
    if model.family in ("llama", "gemma"):
        return _llama(model)
    if model.family == "moe":
        return _deepseek(model) if model.kv_latent else _moe(model)
    if model.family == "gpt":
        return _gpt(model)
    raise RequestError(
        f"model.family is {model.family}, which has no form of Hugging Face here; llama, gemma, moe and gpt have one"
    )


def sizes_of(model: ModelConfig) -> dict[str, int]:
    """Return the size of each letter in the tables of `model`."""
    return {**matmuls.sizes_of(model), "T": 3, "P": 2}


LAYER = "model.layers.{layer}."
"""How the names begin of tensors in a layer of a decoder with rotary positions."""

ROTARY = re.compile(r"(.*\.)?rotary_emb\.inv_freq")


FUSED = {
    "phi3": {
        **{
            f"{LAYER}self_attn.{name}.weight": f"{LAYER}self_attn.qkv_proj.weight"
            for name in ("q_proj", "k_proj", "v_proj")
        },
        **{f"{LAYER}mlp.{name}.weight": f"{LAYER}mlp.gate_up_proj.weight" for name in ("gate_proj", "up_proj")},
    }
}
"""Model type -> the tensor of theirs in which others lie one after the other, as rows, by the names of these."""


def _llama(model: ModelConfig) -> Family:
    """Return the tensors of Llama, and of the types whose layers are Llama's with other values of knobs."""
    if model.norm_form == "layer":
        return _gpt_neox(model)
    names = {name: f"{LAYER}mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    leaves = [*_decoder(model), *_weights(model, "mlp", names)]
    if model.traits.activation != "xielu":
        return _with_output(model, leaves, "model.embed_tokens.weight", "model.", ROTARY)
    of_activation = LAYER + "mlp.act_fn."
    learned = tuple(Piece(of_activation + number, ("I",)) for number in ("alpha_p", "alpha_n"))
    leaves.append(Leaf("blocks.mlp.learned", "LCI", learned))
    family = _with_output(model, leaves, "model.embed_tokens.weight", "model.", ROTARY)
    return replace(family, constants={of_activation + "beta": XIELU_BETA, of_activation + "eps": XIELU_EPS})


def _gpt_neox(model: ModelConfig) -> Family:
    """Return the tensors of GPT-NeoX: query, key and value of a head lie side by side in theirs, as in ours."""
    layer = "gpt_neox.layers.{layer}."
    attention = {"attention.qkv": layer + "attention.query_key_value", "o_proj": layer + "attention.dense"}
    mlp = {"up_proj": layer + "mlp.dense_h_to_4h", "down_proj": layer + "mlp.dense_4h_to_h"}
    leaves = [
        _one("table", "VD", "gpt_neox.embed_in.weight", ("V", "D")),
        *_layer_norm("norm", "D", "gpt_neox.final_layer_norm"),
        *_layer_norm("blocks.norm1", "LD", layer + "input_layernorm"),
        *_layer_norm("blocks.norm2", "LD", layer + "post_attention_layernorm"),
        *_weights(model, "attention", attention),
        *_weights(model, "mlp", mlp),
    ]
    # Masks of attention, one a layer, and the frequencies of rotary positions.
    ignored = re.compile(r"(.*\.)?(attention\.(masked_)?bias|rotary_emb\.inv_freq)")
    return _with_output(model, leaves, "gpt_neox.embed_in.weight", "gpt_neox.", ignored, "embed_out.weight")


def _moe(model: ModelConfig) -> Family:
    """Return the tensors of Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE: those of an expert are tensors of their own."""
    if _has_factors(model):
        return _granite_moe(model)
    if model.sinks:
        return _gpt_oss(model)
    if model.qk_norm == "none" and not model.gates_shared:
        # Mixtral numbers the matrices.
        mlp = LAYER + "block_sparse_moe."
        matrices = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    else:
        mlp = LAYER + "mlp."
        matrices = {name: name for name in ("gate_proj", "up_proj", "down_proj")}
    # Of these models, Qwen2-MoE alone has an expert that all tokens share, with a gate.
    own = model if model.gates_shared else model.model_copy(update={"shared_experts": 0})
    leaves = [
        *_decoder(model),
        *_experts(own, mlp, matrices, "shared_expert"),
        Leaf("blocks.mlp.balance", "LE", ()),
    ]
    return _with_output(model, leaves, "model.embed_tokens.weight", "model.", ROTARY)


def _experts(model: ModelConfig, mlp: str, matrices: Mapping[str, str], shared: str) -> Iterator[Leaf]:
    """Yield the weights of a router, of its experts, and of those that all tokens share, if there are any.

    `matrices` are their names of the parts of an expert, and `shared` is what they call the experts of all tokens.
    """
    beside = {name: mlp + name for name in ("gate", "shared_expert_gate")}
    of_expert = {part: f"{mlp}experts.{{expert}}.{matrix}" for part, matrix in matrices.items()}
    of_shared = {part: f"{mlp}{shared}.{matrix}" for part, matrix in matrices.items()}
    # The parts of both have the same names.
    yield from (leaf for leaf in _weights(model, "mlp", {**beside, **of_expert}) if "shared" not in leaf.path)
    yield from (leaf for leaf in _weights(model, "mlp", {**beside, **of_shared}) if "shared" in leaf.path)


def _deepseek(model: ModelConfig) -> Family:
    """Return the tensors of DeepSeek-V2 and V3: latent attention, layers with an MLP first, experts for all tokens."""
    leaves = [
        _one("table", "VD", "model.embed_tokens.weight", ("V", "D")),
        _one("norm.scale", "D", "model.norm.weight", ("D",)),
    ]
    first = first_layers(model)
    for name, stack in stacks_of(model).items():
        own = matmuls.sizes_of(stack)
        for leaf in _of_deepseek_layer(stack):
            pieces = tuple(replace(piece, first=first[name]) for piece in leaf.pieces)
            path = path_to(name) + leaf.path.removeprefix("blocks.")
            leaves.append(replace(leaf, path=path, pieces=pieces, own={**own, **leaf.own}))
    return _with_output(model, leaves, "model.embed_tokens.weight", "model.", ROTARY)


def _of_deepseek_layer(stack: ModelConfig) -> Iterator[Leaf]:
    """Yield the tensors of a layer of a stack of DeepSeek."""
    attention = LAYER + "self_attn."
    mlp = LAYER + "mlp."
    parts = [part.name for matmul in matmuls.matmuls_of(stack).values() for part in matmul.parts]
    yield from _norms(stack)
    yield from _weights(stack, "attention", {name: attention + name for name in parts})
    yield _one("blocks.attention.kv_norm.scale", "LZ", attention + "kv_a_layernorm.weight", ("Z",))
    if stack.q_latent:
        yield _one("blocks.attention.q_norm.scale", "LA", attention + "q_a_layernorm.weight", ("A",))
    names = {name: mlp + name for name in ("gate_proj", "up_proj", "down_proj")}
    if not stack.traits.routed:
        yield from _weights(stack, "mlp", names)
        return
    yield from _experts(stack, mlp, {name: name for name in names}, "shared_experts")
    balance = (Piece(mlp + "gate.e_score_correction_bias", ("E",), exact=True),) if stack.router == "sigmoid" else ()
    yield Leaf("blocks.mlp.balance", "LE", balance)


def _has_factors(model: ModelConfig) -> bool:
    """Return whether a model has factors that Granite's types alone have."""
    factors = (model.embedding_multiplier, model.residual_multiplier, model.logits_divisor)
    return factors != (1, 1, 1) or model.score_scale != model.usual_score_scale


def _granite_moe(model: ModelConfig) -> Family:
    """Return the tensors of Granite with experts, whose matrices are one tensor in each layer."""
    mlp = LAYER + "block_sparse_moe."
    gate_up = Piece(mlp + "input_linear.weight", ("E", "PF", "D"))
    leaves = [
        *_decoder(model),
        _one("blocks.mlp.router", "LDE", mlp + "router.layer.weight", ("E", "D")),
        Leaf("blocks.mlp.gate_up", "LEDPF", (gate_up,)),
        _one("blocks.mlp.down", "LEFD", mlp + "output_linear.weight", ("E", "D", "F")),
        Leaf("blocks.mlp.balance", "LE", ()),
    ]
    return _with_output(model, leaves, "model.embed_tokens.weight", "model.", ROTARY)


def _gpt_oss(model: ModelConfig) -> Family:
    """Return the tensors of gpt-oss: those of all experts are one, where gates and what they gate take turns."""
    mlp = LAYER + "mlp."
    experts = mlp + "experts."
    leaves = [
        *_decoder(model),
        _one("blocks.attention.sinks", "LKCI", LAYER + "self_attn.sinks", ("KGI",)),
        _one("blocks.mlp.router", "LDE", mlp + "router.weight", ("E", "D")),
        _one("blocks.mlp.router_bias", "LE", mlp + "router.bias", ("E",)),
        _one("blocks.mlp.gate_up", "LEDPF", experts + "gate_up_proj", ("E", "D", "FP")),
        _one("blocks.mlp.gate_up_bias", "LEPF", experts + "gate_up_proj_bias", ("E", "FP")),
        _one("blocks.mlp.down", "LEFD", experts + "down_proj", ("E", "F", "D")),
        _one("blocks.mlp.down_bias", "LED", experts + "down_proj_bias", ("E", "D")),
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
        *_norms(model),
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

NORMS_OF_APERTUS = {"norm1": "attention_layernorm", "norm2": "feedforward_layernorm"}


def _norms(model: ModelConfig) -> Iterator[Leaf]:
    """Yield the norms over the residual stream in a layer."""
    names = NORMS_OF_APERTUS if model.traits.activation == "xielu" else NORMS[model.norms]
    for ours, theirs in names.items():
        yield _one(f"blocks.{ours}.scale", "LD", f"{LAYER}{theirs}.weight", ("D",))


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
        leaves.append(Leaf(f"blocks.{matmul.path}", "L" + letters, of_weight, matmul.sizes))
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


def _with_output(
    model: ModelConfig,
    leaves: list[Leaf],
    table: str,
    prefix: str,
    ignored: re.Pattern[str],
    output: str = "lm_head.weight",
) -> Family:
    """Return the family with the `output` projection, which is the `table` itself where it is tied."""
    if model.tied:
        return Family(tuple(leaves), {output: table}, prefix, ignored)
    return Family((*leaves, _one("output", "VD", output, ("V", "D"))), {}, prefix, ignored)


def _one(path: str, letters: str, name: str, dims: tuple[str, ...]) -> Leaf:
    """Return a parameter that is one tensor of theirs."""
    return Leaf(path, letters, (Piece(name, dims),))
