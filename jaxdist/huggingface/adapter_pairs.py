"""Where the low-rank pairs of a run lie among its parameters: beside which weight, and which part of it. No jax here.

A weight [L, *in, *out] has pairs A [L, *in, r] and B [L, r, *out]. Of weights that lie fused in one array along C or T,
each has a pair of its own, whose B has that dim too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from jaxdist.config import ModelConfig, lora
from jaxdist.huggingface.families import Leaf, family_of, sizes_of
from jaxdist.huggingface.parts import GROUP, JOINED, Span, shape_of

FUSED = "T"
"""The letter along which queries, keys and values lie in GPT-2's tensor too."""

COLUMNS = {
    "blocks.attention.qkv": ("q_proj", "k_proj", "v_proj"),
    "blocks.mlp.gate_up": ("gate_proj", "up_proj"),
    "blocks.mlp.up": ("up_proj",),
}
"""Targets that make further dims of the residual stream, in their order, by the path of the weight."""

ROWS = {"blocks.attention.out": "o_proj", "blocks.mlp.down": "down_proj"}
"""Targets that go back to it."""


@dataclass(frozen=True)
class PairPlace:
    """One pair of a run."""

    target: str
    """Its name among `lora_targets.TARGETS`."""
    leaf: Leaf
    """The weight that it stands beside."""
    inputs: int
    """How many dims of the weight, after that of the layers, are contracted."""
    dim: int
    """The dim of the weight along which fused targets lie side by side; of one that is not fused, its first output."""
    joined: Span
    """The places of the target along `dim`."""

    @property
    def a(self) -> str:
        """The path of A."""
        return f"{self._module}.a"

    @property
    def b(self) -> str:
        """The path of B."""
        return f"{self._module}.b"

    @property
    def _module(self) -> str:
        parent, _, _ = self.leaf.path.rpartition(".")
        return f"{parent}.{lora.ADAPTERS}.{self.target}"

    def shapes(self, model: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the shapes of A and B by their paths."""
        shape = list(shape_of(self.leaf, sizes_of(model)))
        shape[self.dim] = self.joined[1] - self.joined[0]
        first_output = 1 + self.inputs
        return {
            self.a: (*shape[:first_output], model.lora_rank),
            self.b: (shape[0], model.lora_rank, *shape[first_output:]),
        }


def pairs_of(model: ModelConfig) -> list[PairPlace]:
    """Return the pairs of a run, in the order of the weights that they stand beside."""
    sizes = sizes_of(model)
    adapted = lora.adapted(model)
    leaves = family_of(model).leaves
    return [pair for leaf in leaves for pair in _beside(leaf, sizes) if pair.target in adapted]


def _beside(leaf: Leaf, sizes: Mapping[str, int]) -> Iterator[PairPlace]:
    """Yield all pairs that a weight can have."""
    if leaf.path in ROWS:
        last = leaf.letters[-1]
        yield PairPlace(ROWS[leaf.path], leaf, len(leaf.letters) - 2, len(leaf.letters) - 1, (0, sizes[last]))
    targets = COLUMNS.get(leaf.path, ())
    if len(targets) == 1:
        yield PairPlace(targets[0], leaf, 1, 2, (0, sizes[leaf.letters[2]]))
        return
    start = 0
    for target in targets:
        dim = leaf.letters.index(JOINED if JOINED in leaf.letters else FUSED)
        # Queries alone have several places along C: one for each head that shares a key and a value.
        several = target == "q_proj" and JOINED in leaf.letters
        stop = start + (sizes[GROUP] if several else 1)
        yield PairPlace(target, leaf, 1, dim, (start, stop))
        start = stop
