"""Where the low-rank pairs of a run lie among its parameters: beside which weight, and which part of it. No jax here.

A weight [L, *in, *out] has pairs A [L, *in, r] and B [L, r, *out]. Of weights that lie fused in one array along C or T,
each has a pair of its own, whose B has that dim too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from jaxdist.config import ModelConfig, lora
from jaxdist.config.matmuls import FUSED, Matmul, matmuls_of
from jaxdist.config.stacks import path_to, stacks_of
from jaxdist.huggingface.families import Leaf, sizes_of
from jaxdist.huggingface.parts import Span, shape_of
from jaxdist.huggingface.type_choice import family_of


@dataclass(frozen=True)
class PairPlace:
    """One pair of a run."""

    target: str
    """Its name among `lora_targets.TARGETS`."""
    leaf: Leaf
    """The weight that it stands beside."""
    matmul: Matmul
    """What the weight multiplies, and its parts."""
    dim: int
    """The dim of the weight along which fused targets lie side by side; of one that is not fused, its first output."""
    joined: Span
    """The places of the target along `dim`."""

    @property
    def inputs(self) -> int:
        """How many dims of the weight, after that of the layers, are contracted."""
        return len(self.matmul.inputs)

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
    leaves = {leaf.path: leaf for leaf in family_of(model).leaves}
    found = []
    for name, stack in stacks_of(model).items():
        adapted = lora.adapted(stack)
        for matmul in matmuls_of(stack).values():
            if matmul.adaptable:
                pairs = _beside(leaves[path_to(name) + matmul.path], matmul)
                found += [pair for pair in pairs if pair.target in adapted]
    return found


def _beside(leaf: Leaf, matmul: Matmul) -> Iterator[PairPlace]:
    """Yield all pairs that a weight can have."""
    if FUSED not in matmul.letters:
        (part,) = matmul.parts
        outputs = matmul.sizes[matmul.outputs[0]]
        yield PairPlace(part.name, leaf, matmul, 1 + len(matmul.inputs), (0, outputs))
        return
    start = 0
    for part in matmul.parts:
        stop = start + matmul.places(part)
        yield PairPlace(part.name, leaf, matmul, 1 + matmul.letters.index(FUSED), (start, stop))
        start = stop
