"""Check that the matmuls of a model are written for fp8 (`parallel.float8`)."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config
from jaxdist.output.units import remedy
from jaxdist.request.checks.registry import check


@check("precision", "model.family")
def _written(config: Config) -> Iterator[str]:
    model = config.model
    if config.numbers.float8 and model.images:
        yield (
            f"precision is {config.precision}, but model.family is {model.family}, and the matmuls of a network for "
            f"images are not written for it; " + remedy("precision to bfloat16")
        )
