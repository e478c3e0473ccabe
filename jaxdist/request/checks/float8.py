"""Check that the matmuls of a model are written for fp8 (`parallel.float8`)."""

from __future__ import annotations

from collections.abc import Iterator

from jaxdist.config import Config
from jaxdist.output.units import remedy
from jaxdist.request.checks.registry import check


@check("precision", "model.family")
def _written(config: Config) -> Iterator[str]:
    model = config.model
    if not config.numbers.float8:
        return
    if model.images or model.traits.routed:
        what = "a network for images" if model.images else "experts"
        yield (
            f"precision is {config.precision}, but model.family is {model.family}, and the matmuls of {what} are not "
            f"written for it; " + remedy("precision to bfloat16")
        )
