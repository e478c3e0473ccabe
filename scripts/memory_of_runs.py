"""Sort runs that fitted from runs that ran out of memory by the memory model, and print right and wrong by source.

    python scripts/memory_of_runs.py measured.csv            by source
    python scripts/memory_of_runs.py measured.csv --wrong    also each row that is sorted wrongly, with what it holds

Each row of the file is a run that somebody published: its model, batch, mesh, ZeRO stage and activation checkpointing,
and a measured step or the word OOM. Rows in 8 bits, with experts, with attention that writes its scores, and rows
that do not say what they recompute, are left out. The programs are not jaxdist's. Three rules say what they keep
otherwise, the first two for all rows alike:

* With parameters in bfloat16, they sum gradients in bfloat16: 2 bytes for each parameter in use. jaxdist keeps sums in
  float32 beside the gradients of a micro-batch.
* Norms without a kernel of their own keep two float32 values for each element of the residual stream, which XLA makes
  again.
* Aleph Alpha's program has the logits of a whole micro-batch on every device, in float32. jaxdist makes a chunk of them
  at a time, of its own part of the vocabulary.

The first table is by the memory model of jaxdist, the second one by these rules too.
"""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from jaxdist.config import Config, ModelConfig
from jaxdist.models import Model, build_decoder
from jaxdist.output.tables import table
from jaxdist.output.units import size
from jaxdist.planning.clusters import Cluster, cluster
from jaxdist.planning.memory import Memory
from jaxdist.planning.search.estimate import estimate

CLUSTERS = {"A100-80": "a100-hdr", "a100_80": "a100-hdr", "a100_40": "a100-40", "H100": "h100-ndr", "h100": "h100-ndr"}
"""The beginning of a GPU's name in the file -> the cluster whose memory it has."""

REMATS = {"none": "none", "full": "block", "selective": "none"}
"""Activation checkpointing there -> here: of attention alone, flash attention leaves nothing to recompute."""

PRECISIONS = {"bf16": "mixed", "BF16": "mixed", "amp_bf16": "bfloat16"}
"""Precision there -> here. amp_bf16 keeps parameters and gradients in float32."""

WRITES_SCORES = ("torch", "fused")
"""Kernels of attention that keep the scores of all tokens, as none of jaxdist's does."""

BYTES_OF_GRADIENTS = 2
"""For each parameter in use, of programs whose parameters are in bfloat16."""

GATHER_LOGITS = ("AlephAlpha2023",)
"""Sources whose program gathers the logits of a micro-batch over the model axis, and casts all of them to float32: the
output layer and the loss of Aleph-Alpha/scaling, a later version of that program, at 01b9d21."""

BYTES_OF_LOGITS = 2 + 3 * 4
"""For each of them, as PyTorch runs that loss: bfloat16, and in float32 their log-softmax, its gradient and theirs."""

BYTES_OF_NORMS = 2 * 2 * 4
"""For each element of the residual stream and layer: two float32 values of each of two norms."""

MARGIN = 0.1
"""A run whose memory differs from the GPU's by less is near the limit: fragmentation decides."""


@dataclass(frozen=True)
class Verdict:
    """A row, and how the memory model sorts it."""

    row: dict[str, str]
    held: Memory
    where: Cluster
    in_use: int
    """Parameters."""

    @property
    def ran(self) -> bool:
        """Whether the run fitted."""
        return self.row["value"] != "OOM"

    @property
    def eager_norms(self) -> bool:
        """Whether norms have no kernel of their own."""
        return "kernel: " in self.row["where"] and "RMS kernel" not in self.row["where"]

    @property
    def theirs(self) -> float:
        """The bytes that the other program holds, by the three rules: in a layer, or in the loss."""
        row = self.row
        held = self.held
        rows = int(row["microbatch"] or 1)
        stages = int(row["pp"] or 1)
        tokens = rows * int(row["seq"])
        beside: float = held.total - held.activations - held.working
        if PRECISIONS[row["precision"]] == "mixed":
            beside += BYTES_OF_GRADIENTS * self.in_use - held.gradients
        # On the first stage of 1F1B, as many micro-batches are in flight as there are stages; on the last stage, one.
        in_flight = min(stages, int(row["global_batch"]) // (int(row["dp"]) * rows))
        norms = BYTES_OF_NORMS * tokens * int(row["hidden"]) * self.eager_norms
        kept = norms * int(row["layers"]) / stages * (row["remat"] == "none")
        in_layer = beside + held.activations + held.working + max(norms, kept * in_flight)
        if row["source"] not in GATHER_LOGITS:
            return in_layer
        logits = BYTES_OF_LOGITS * tokens * int(row["vocab"])
        return max(in_layer, beside + held.activations / in_flight + kept + logits)

    def fits(self, theirs: bool = False) -> bool:
        """Return whether it is predicted to fit; `theirs` is by the rules too."""
        return self.share(theirs) <= 1

    def share(self, theirs: bool = False) -> float:
        """Return the predicted memory over that of the GPU."""
        return (self.theirs if theirs else self.held.total) / self.where.memory

    @property
    def reason(self) -> str:
        """Why it may be sorted wrongly, as far as the row shows."""
        if abs(self.share(theirs=True) - 1) < MARGIN:
            return "near the limit"
        if not self.ran and self.eager_norms and self.row["remat"] == "full":
            return "a layer that is computed again, norms in eager mode, holds more than the rules say"
        if not self.ran:
            return "the program holds more than the rules say"
        return "the program holds less than the rules say"


@cache
def _built(sizes: ModelConfig) -> Model:
    return build_decoder(sizes)


def verdict(row: dict[str, str]) -> Verdict | None:
    """Return how a row is sorted; None for one that is not comparable."""
    name = next((found for start, found in CLUSTERS.items() if row["gpu"].startswith(start)), None)
    if any(f"kernel: {kernel}" in row["where"] for kernel in WRITES_SCORES):
        return None
    if name is None or row["remat"] not in REMATS or row["precision"] not in PRECISIONS or not row["layers"]:
        return None
    count = {axis: int(row[axis] or 1) for axis in ("tp", "pp", "dp", "ep", "cp")}
    rows = int(row["global_batch"])
    micro = rows // (count["dp"] * int(row["microbatch"] or 1))
    if not micro or count["ep"] > 1 or micro * count["dp"] * int(row["microbatch"] or 1) != rows:
        return None
    staged = count["pp"] > 1
    zero = int(row["zero"] or 0)
    knobs = {
        "mesh": f"data={count['dp']},context={count['cp']},model={count['tp']},pipeline={count['pp']}",
        "precision": PRECISIONS[row["precision"]],
        "model.family": "llama" if row["gated"] == "1" else "gpt",
        "model.layers": int(row["layers"]),
        "model.embed": int(row["hidden"]),
        "model.heads": int(row["heads"]),
        "model.kv_heads": int(row["kv_heads"] or 0) if row["gated"] == "1" else 0,
        "model.mlp": int(row["ffn"] or 0),
        "model.vocab": int(row["vocab"]),
        "model.sequence": int(row["seq"]),
        "model.tied": False,
        "model.remat": REMATS[row["remat"]],
        "parallel.zero": zero,
        "train.global_batch_size": rows,
        "train.accumulation": 1 if staged else micro,
        "pipeline.microbatches": micro if staged else 0,
        # Other programs run a micro-batch through all layers before the next.
        "parallel.micro_batches": "outside" if zero >= 2 and not staged else "inside",
    }
    where = cluster(name)
    config = Config().with_knobs(knobs).with_precision(cpu=False)
    found = estimate(config, _built(config.model), where)
    return Verdict(row, found.memory, where, sum(p.use for p in found.sharded.parameters))


def main(path: str, *options: str) -> None:
    """Print right and wrong by source."""
    found = []
    left_out: Counter[str] = Counter()
    with Path(path).open() as file:
        for row in csv.DictReader(file):
            one = None
            try:
                one = verdict(row)
            except (ValueError, AssertionError) as error:
                print(f"{row['source']} {row['model']}: {str(error)[:100]}", file=sys.stderr)
            if one is None:
                left_out[row["source"]] += 1
            else:
                found.append(one)
    for theirs, title in ((False, "by the memory model of jaxdist"), (True, "by what the other programs keep too")):
        print(f"{title}\n")
        print("\n".join(table(list(_sorted(found, left_out, theirs)))))
        print()
    wrong = [one for one in found if one.ran != one.fits(theirs=True)]
    for reason, count in Counter(("ran" if one.ran else "OOM", one.reason) for one in wrong).most_common():
        print(f"{count:4} {reason[0]}: {reason[1]}")
    if "--wrong" in options:
        print()
        for one in wrong:
            cells = [
                one.row[key] for key in ("source", "model", "gpu", "tp", "pp", "dp", "microbatch", "remat", "value")
            ]
            held = ", ".join(f"{name} {size(count)}" for name, count in one.held.transient.items() if count)
            shares = f"{one.share(theirs=True):.0%}, ours {one.share():.0%}"
            print(" ".join(cells), f"{shares}: state {size(one.held.arguments)}, {held}; {one.reason}")


def _sorted(found: list[Verdict], left_out: Counter[str], theirs: bool) -> Iterator[tuple[str, ...]]:
    """Yield how many rows of each source are sorted rightly, as the rows of a table."""
    yield "source", "rows", "right", "ran, said not to fit", "out of memory, said to fit", "left out"
    groups: dict[str, list[Verdict]] = {}
    for one in sorted(found, key=lambda one: one.row["source"]):
        groups.setdefault(one.row["source"], []).append(one)
    every = {"all": found, "all, norms with a kernel": [one for one in found if not one.eager_norms]}
    for name, of in (groups | every).items():
        right = sum(one.ran == one.fits(theirs) for one in of)
        share = f"{right} ({right / len(of):.0%})" if of else "-"
        refused = sum(one.ran and not one.fits(theirs) for one in of)
        missed = sum(one.fits(theirs) and not one.ran for one in of)
        yield name, str(len(of)), share, str(refused), str(missed), str(left_out[name]) if name in groups else "-"


if __name__ == "__main__":
    main(*sys.argv[1:])
