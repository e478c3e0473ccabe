"""How the weights of layers are matrices to an update rule that reads them as wholes (`optimizers.muon`)."""

from __future__ import annotations

from functools import lru_cache

from jaxdist.config.matmuls import FUSED, Matmul, matmuls_of
from jaxdist.config.model import ModelConfig
from jaxdist.config.stacks import path_to, stacks_of
from jaxdist.optimizers.rule import Matrices


# The candidates of a search ask for those of a few models.
@lru_cache(maxsize=64)
def matrices_of(config: ModelConfig) -> tuple[tuple[str, Matrices], ...]:
    """Return how the weights of the layers that multiply tokens are matrices, by their paths among the parameters.

    A model without a table of such weights, of images, has none.
    """
    if config.images:
        return ()
    return tuple(
        (path_to(name) + path, as_matrices(matmul))
        for name, stack in stacks_of(config).items()
        for path, matmul in matmuls_of(stack).items()
        # A gate of one column is a vector.
        if matmul.out > 1
    )


def as_matrices(matmul: Matmul) -> Matrices:
    """Return how a weight is matrices: what the product contracts is the rows, and each part is a matrix by itself."""
    letters = matmul.letters.removeprefix("E") if matmul.stacked else matmul.letters
    fused = letters.index(FUSED) if FUSED in letters else None
    places = tuple(matmul.places(part) for part in matmul.parts) if fused is not None else ()
    return Matrices(
        experts=int(matmul.stacked),
        inputs=tuple(letters.index(letter) for letter in matmul.inputs),
        fused=fused,
        places=places,
    )
