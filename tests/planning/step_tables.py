"""Published times of steps: which rows they are. `scripts/fit_planner.py` predicts them, and judges the predictions."""

from __future__ import annotations

from tests.planning.published import Entry

TABLES = [
    Entry("MosaicML llm-foundry", "tokens_per_s", 59),
    Entry("Korthikanti2022", "iteration_time", 6),
    Entry("Korthikanti2022", "layer_forward_time", 5),
    # That of full recomputation is judged from the others.
    Entry("Korthikanti2022", "layer_backward_time", 4, where=lambda row: row.remat != "full"),
    Entry("Narayanan2021", "achieved_TFLOPs", 18),
    Entry("MT-NLG530B", "iteration_time", 2),
    Entry("Alpa", "iteration_time", 1, where=lambda row: row.table == "benchmark README"),
]
