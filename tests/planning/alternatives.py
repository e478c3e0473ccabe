"""One model on so many GPUs, split in several ways: a published ablation, and what the planner makes of it.

Zheng et al. 2022 (Alpa) trained four GPTs on 1, 2, 4 and 8 V100s of one host by data parallelism, ZeRO 2 and 3, and
on each shape of a mesh. Suite: alpa 8350d91, benchmark/alpa/exp_intra_ablation.py. What ran out of memory and what was
fastest is told by osdi22_artifact/results_intra_ablation_ref.tsv there, whose figures are not here: `python -m
benchmarks.planning alternatives FILE` holds them beside these predictions. Not jaxdist's are its own heuristic, and
meshes of which its solver may have split otherwise than their shape says: they count as what the shape says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from jaxdist.config import Config
from jaxdist.mesh import DATA, MODEL
from jaxdist.models import build
from jaxdist.planning import certainty
from jaxdist.planning.clusters import cluster
from jaxdist.planning.search.estimate import Estimate, estimate
from jaxdist.planning.search.risk import risk

WIDTHS = {1: (2048, 16), 2: (3072, 24), 4: (4096, 32), 8: (5760, 40)}
"""GPUs -> (width, heads) of their model. All have 8 layers, and a step is 8 rows of 1024 tokens."""


@dataclass(frozen=True)
class Way:
    """One row of the ablation."""

    data: int
    model: int
    zero: int
    method: str
    """What the published file calls it."""
    ran: bool = True
    """Whether the memory was enough."""
    fastest: bool = False
    """Of those with as many GPUs."""

    @property
    def gpus(self) -> int:
        return self.data * self.model

    @property
    def name(self) -> str:
        return f"{self.data}x{self.model}, ZeRO {self.zero}"

    @cached_property
    def plain(self) -> Estimate:
        """Predicted, of jaxdist's own step."""
        width, heads = WIDTHS[self.gpus]
        sizes = {"layers": 8, "embed": width, "heads": heads, "vocab": 25600, "sequence": 1024, "remat": "block"}
        given = {
            "mesh": f"{self.data}x{self.model}x1",
            "precision": "mixed",
            "model": {"family": "gpt", **sizes},
            "parallel": {"zero": self.zero},
            "train": {"global_batch_size": 8},
        }
        config = Config.model_validate(given)
        return estimate(config, build(config.model), cluster("v100-nvlink"))

    @property
    def seconds(self) -> float:
        """Predicted, of jaxdist's own step, at the price by which a search chooses."""
        return self.plain.pessimistic

    @property
    def memory(self) -> int:
        """Predicted bytes."""
        return self.plain.memory.total


AUTO = "auto_sharding"
"""The published file has one for each shape, in their order."""

WAYS = [
    Way(1, 1, 0, AUTO, fastest=True),
    Way(2, 1, 2, "zero_2", fastest=True),
    Way(1, 2, 0, AUTO),
    Way(2, 1, 0, "data_parallel", ran=False),
    Way(2, 1, 3, "zero_3"),
    Way(4, 1, 2, "zero_2", fastest=True),
    Way(2, 2, 2, AUTO),
    Way(1, 4, 0, AUTO),
    Way(4, 1, 0, "data_parallel", ran=False),
    Way(4, 1, 3, "zero_3"),
    Way(8, 1, 2, "zero_2", ran=False),
    Way(4, 2, 2, AUTO),
    Way(2, 4, 2, AUTO),
    Way(1, 8, 0, AUTO, fastest=True),
    Way(8, 1, 0, "data_parallel", ran=False),
    Way(8, 1, 3, "zero_3"),
]

GROUPS = [[way for way in WAYS if way.gpus == count] for count in (2, 4, 8)]
"""Those with something to choose."""


def chosen(ways: Iterable[Way]) -> Way:
    """As `search` chooses: of those that fit and that predictions cannot tell from the fastest, that of the least
    risk."""
    fit = [way for way in ways if way.plain.fits]
    fastest = min(fit, key=lambda way: way.seconds)
    times = {way: way.seconds / fastest.seconds for way in fit}
    tied = [way for way in fit if times[way] <= 1 + certainty.tie(way.plain.kind, fastest.plain.kind)]
    return min(tied, key=lambda way: risk(way.plain))


RULES: dict[str, Callable[[Way], bool]] = {
    "tensor in a host, then data": lambda way: way.plain.shape[MODEL] == way.gpus,
    "fully sharded only": lambda way: way.zero == 3 and way.plain.shape[DATA] == way.gpus,
}
"""What would be chosen without a prediction: one way of each group."""


def by_rule(ways: Iterable[Way], rule: str) -> Way:
    (way,) = filter(RULES[rule], ways)
    return way
