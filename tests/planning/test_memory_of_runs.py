"""The script that sorts published runs by the memory model: what it compares, and how it counts."""

import csv

import pytest

from scripts import memory_of_runs

ROW = {
    "source": "S", "model": "13B", "layers": "40", "hidden": "5120", "heads": "40", "kv_heads": "40", "ffn": "13824",
    "gated": "1", "seq": "2048", "vocab": "32000", "global_batch": "512", "microbatch": "1", "gpu": "A100-80GB",
    "tp": "2", "pp": "2", "dp": "16", "ep": "", "cp": "1", "zero": "1", "precision": "bf16", "remat": "full",
    "where": "kernel: flash", "value": "20.5",
}  # fmt: skip
"""A run that fits with room."""


def test_a_run_is_held_as_its_row_says():
    found = memory_of_runs.verdict(ROW)
    assert (found.ran, found.fits()) == (True, True)
    # 13.0 billion parameters of 40 layers and two tables, over model=2 and pipeline=2: 14/16 bytes each between steps.
    layer = 4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120
    assert found.held.arguments == pytest.approx(14 / 16 * (40 * layer + 2 * 32000 * 5120) / 4, rel=0.02)
    smaller = memory_of_runs.verdict(ROW | {"gpu": "a100_40gb"})
    assert smaller.share() == pytest.approx(found.share() * found.where.memory / smaller.where.memory)
    assert memory_of_runs.verdict(ROW | {"remat": "none", "microbatch": "8"}).held.total > 2 * found.held.total


def test_one_program_has_all_logits_of_a_micro_batch_on_every_device():
    """In float32, however many devices split the vocabulary."""
    row = ROW | {"vocab": "128000", "microbatch": "4", "seq": "8192"}
    logits = 14 * 4 * 8192 * 128000
    assert memory_of_runs.verdict(row).theirs < logits
    for ways in ({}, {"tp": "4", "dp": "8"}):
        assert memory_of_runs.verdict(row | ways | {"source": "AlephAlpha2023"}).theirs > logits


@pytest.mark.parametrize(
    "change",
    [
        {"gpu": "B200"},
        {"remat": ""},
        {"precision": "FP8"},
        {"where": "kernel: torch"},
        {"ep": "8"},
        {"microbatch": "7"},
    ],
)
def test_what_is_not_comparable_is_left_out(change):
    assert memory_of_runs.verdict(ROW | change) is None


def test_right_and_wrong_are_counted_by_source(tmp_path, capsys):
    rows = [ROW, ROW | {"value": "OOM"}, ROW | {"source": "T", "pp": "1", "tp": "1", "dp": "8", "zero": "0"}]
    rows.append(ROW | {"remat": ""})
    with (tmp_path / "runs.csv").open("w") as file:
        writer = csv.DictWriter(file, list(ROW))
        writer.writeheader()
        writer.writerows(rows)
    memory_of_runs.main(str(tmp_path / "runs.csv"), "--wrong")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    of_s, of_t, theirs_of_s, theirs_of_t, *wrong = [line for line in lines if line[:1] in (["S"], ["T"])]
    every = next(line for line in lines if line[:1] == ["all"])
    # Of S one is right, one ran out of memory though it is said to fit; of T one ran that is said not to.
    assert of_s == theirs_of_s == ["S", "2", "1", "(50%)", "0", "1", "1"]
    assert of_t == theirs_of_t == ["T", "1", "0", "(0%)", "1", "0", "0"]
    assert every == ["all", "3", "1", "(33%)", "1", "1", "-"]
    assert len(wrong) == 2


def test_what_other_programs_keep_is_told_by_two_rules():
    row = ROW | {"remat": "none", "where": "kernel: flash + RMS kernel"}
    found = memory_of_runs.verdict(row)
    gradients = found.held.transient["gradients"]
    assert found.held.total - found.theirs == gradients - 2 * found.in_use
    assert found.in_use == pytest.approx(13.0e9 / 4, rel=0.01)
    # Two float32 values of each of two norms: two micro-batches of 2,048 tokens, 20 layers.
    eager = memory_of_runs.verdict(row | {"where": "kernel: flash"})
    assert eager.theirs - found.theirs == 4 * 4 * 2 * 2048 * 5120 * 20
    again = memory_of_runs.verdict(row | {"where": "kernel: flash", "remat": "full"})
    assert again.theirs - memory_of_runs.verdict(row | {"remat": "full"}).theirs == 4 * 4 * 2048 * 5120
    # In float32, gradients are those of jaxdist.
    whole = memory_of_runs.verdict(row | {"precision": "amp_bf16"})
    assert whole.theirs == whole.held.total
