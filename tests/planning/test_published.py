"""Published rows against the forms of `tests.planning.theory`: each is judged, or named with a reason."""

from collections import Counter
from statistics import mean

import pytest

from tests.planning import judges
from tests.planning.judges import FORMULAS, JUDGES, LLAMA3, Verdict, all_verdicts, verdicts
from tests.planning.published import NOT_JUDGED, rows
from tests.planning.step_tables import TABLES
from tests.planning.theory import sizes

BY_ENTRY = [(kind, judge) for kind, entries in JUDGES.items() for judge in entries]


def test_each_row_has_one_entry():
    entries = [*(judge for _, judge in BY_ENTRY), *TABLES, *(one for left in NOT_JUDGED.values() for one in left)]
    of_row = [[entry for entry in entries if entry.has(row)] for row in rows()]
    assert [row for row, found in zip(rows(), of_row, strict=True) if len(found) != 1] == []
    counted = Counter(found[0] for found in of_row)
    assert [(entry, counted[entry]) for entry in entries if counted[entry] != entry.count] == []


def test_how_many_rows_are_judged():
    assert len(rows()) == 486
    assert Counter(verdict.kind for verdict in all_verdicts()) == {"formula": 69, "memory": 15, "derived": 161}
    assert sum(table.count for table in TABLES) == 95
    assert sum(entry.count for entries in NOT_JUDGED.values() for entry in entries) == 146


def test_what_papers_computed_is_formula_and_nothing_else():
    by_kind = [row for row in rows() if row.kind in ("formula", "NCCL model")]
    assert by_kind == [row for row in rows() if any(judge.has(row) for judge in FORMULAS)]


@pytest.mark.parametrize(
    ("kind", "judge"), BY_ENTRY, ids=lambda x: x if isinstance(x, str) else f"{x.source}-{x.metrics}"
)
def test_rows(kind, judge):
    """Within the tolerance; a known failure is outside, or it is none any more."""
    assert [_told(v) for v in verdicts(kind, judge) if v.holds == bool(v.known)] == []


def _told(v: Verdict) -> str:
    return f"{v.row.table} {v.row.model} {v.row.metric}: {v.row.text}, predicted {v.predicted:.5g}"


@pytest.mark.parametrize("source", sorted({entry.source for entry in judges.MEMORY}))
def test_memory_is_within_a_tenth_in_the_mean(source):
    """Failures count. All these runs fitted, and are predicted to; the table has none that ran out of memory."""
    found = [v for v in all_verdicts() if v.kind == "memory" and v.row.source == source]
    assert mean(abs(v.error) for v in found) < 0.1
    capacity = {"H800": 80, "V100 p3.16xlarge": 16, "H100-96GB HBM2e 500W": 96}
    assert [v.row for v in found if max(v.predicted, v.row.value) > capacity[v.row.gpu]] == []


def test_two_of_three_matrices_explain_the_row_that_fails(monkeypatch):
    """Why the row of GPT OSS fails: so it comes out, its window of 128 tokens in every other layer left out as well."""
    (row,) = [v.row for v in all_verdicts() if v.row.model == "GPT OSS 120B"]
    three = sizes.matrices
    monkeypatch.setattr(sizes, "matrices", lambda h, f, q, kv, gated: three(h, f, q, kv, gated=False))
    assert judges.rate(row) == pytest.approx(row.value, rel=5e-4)


def test_devices_are_the_product_of_the_axes():
    """The first version of the Llama 3 paper printed a data axis of 4 with 16 for the sequence: this finds it."""
    told = [row for row in rows() if row.dp]
    assert len(told) > 300
    assert [r for r in told if r.gpus != (r.tp or 1) * (r.pp or 1) * r.dp * (r.cp or 1)] == []


@pytest.mark.parametrize(
    ("source", "within"),
    [
        ("MosaicML llm-foundry", 0),
        ("Narayanan2021", 5e7),
        ("Alpa", 3e6),  # who leaves its positions out
        ("torchtitan", 1e9),
        ("Megatron-LM PR482", 5e5),
        ("Llama3", 1e9),
    ],
)
def test_parameters(source, within):
    """As precisely as each source prints them."""
    told = {(r.layers, r.hidden, r.vocab, r.seq, r.params) for r in rows() if r.source == source and r.params}
    for L, h, V, s, params in told:
        if "Llama" in source or source in ("torchtitan", "Megatron-LM PR482"):
            f, kv = (11_008, h) if V == 32_000 else (LLAMA3[L][1], LLAMA3[L][3])
            counted = sizes.llama(L, h, f, kv, V)
        else:
            counted = sizes.gpt(L, h, V, s)
        assert abs(counted - params) <= within, (L, h, counted, params)
