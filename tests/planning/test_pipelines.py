"""What a plan says of a pipeline: which layers lie where, what is uneven, ticks, bubble and what is in flight."""

import pytest

from jaxdist import models, train
from jaxdist.mesh.split import Split
from jaxdist.output import units
from jaxdist.planning import layout_notes, memory, pipelines, remedies
from jaxdist.planning.pipelines import pipeline_of
from jaxdist.request.checks import problems
from jaxdist.request.knobs import KNOBS
from tests.planning.pipelines import config, laid
from tests.planning.sharded import sharded_by
from tests.planning.test_parameter_layout import Plan


def told(mesh: str, **of) -> list[str]:
    one = config(mesh, **of)
    return layout_notes.notes(sharded_by(one, models.build(one.model), laid(one)))


def test_a_device_holds_the_layers_of_its_stage_and_its_part_of_the_vocabulary():
    one = config("2x2x2", zero=1)
    by_name = {p.name: p for p in sharded_by(one, models.build(one.model), laid(one)).parameters}
    up, table = by_name["blocks.mlp.up"], by_name["table"]
    assert (up.shape, up.layers, up.rest, up.use) == ((1, 2, 2, 32, 128), 2, 2 * 32 * 128 // 4, 2 * 32 * 128 // 2)
    assert (table.rest, table.use, table.layers) == (96 * 32 // 8, 96 * 32 // 4, 1)
    assert up.at_once == up.use // 2


@pytest.mark.parametrize("virtual", [2, 4])
def test_data_never_splits_what_counts_layers(virtual):
    """The dim of a rank's chunks divides by data, and gradients came out wrong where it was split."""
    one = config("2x1x2", "interleaved", virtual=virtual, zero=3, layers=8)
    parameters = sharded_by(one, models.build(one.model), laid(one)).parameters
    stacked = [p.place.shard_dim for p in parameters if p.stacked]
    assert len(stacked) == 12
    assert all(dim > 2 for dim in stacked)


def test_a_pipeline_lists_what_it_is_and_the_bytes_add_up():
    plan = Plan("2x2x2", zero=3)
    row = plan.row("blocks.norm1.scale")
    assert row[1:5] == ["1x2x1x32", "layers stages layers norm", "- pipeline - data", "- pipeline - -"]
    assert plan.row("table")[3] == "pipeline+model data"
    held = memory.predict(sharded_by(plan.config, models.build(plan.config.model), plan.layout))
    listed = sum(memory.state(plan.config, p, pipelined=True) for p in plan.parameters)
    assert listed == held.parameters + held.optimizer - 20  # counters


def test_padding_is_told_with_its_cost():
    (note,) = told("1x1x2", layers=5)
    assert note.startswith("model.layers 5 does not divide by 2 stages: chunks have 3 2 layers")
    assert "1 of 6 layers are padding, which takes 20.0% more memory and time for the layers" in note
    assert note.endswith("set model.layers to 4 or 6")
    (note,) = told("1x1x2", schedule="interleaved", layers=6)
    assert "2 stages x 2 virtual stages" in note
    assert note.endswith("set model.layers to 4 or 8")
    assert told("1x1x2", layers=6) == []


def test_rows_added_to_the_vocabulary_are_told():
    (note,) = told("1x2x2", vocab=97)
    assert note == (
        "vocabulary 97 padded to 100 in memory, to divide by 4; the added rows are in no loss and no checkpoint"
    )
    assert told("1x2x2", vocab=96) == []
    assert told("1x2x2", vocab=97, whole_vocab=True) == []


@pytest.mark.parametrize(
    ("schedule", "ticks", "slots"),
    [("1f1b", 14, (11, 8, 11)), ("gpipe", 22, (11, 8, 11)), ("interleaved", 26, (19, 12, 19))],
)
def test_slots_run_in_whole_segments(schedule, ticks, slots):
    """S=4, M=8: forward and backward M + S - 1 ticks each; interleaved vM + S - 1, the head in more than M."""
    pipe = pipeline_of(Split(config("1x1x4", schedule, microbatches=8, layers=8), dict(laid(config("1x1x4")).axes)))
    assert pipe.schedule.ticks == ticks
    assert tuple(pipe.ticks(slot) for slot in "FHB") == slots


def test_an_asynchronous_pipeline_tells_its_versions_and_how_late_gradients_are():
    asked = config("1x1x4", "pipedream", microbatches=1, remat="none")
    pipe = pipeline_of(Split(asked, dict(laid(asked).axes)))
    assert pipe.json() | {"schedule": "pipedream", "ticks": 2, "in_flight": [4, 3, 2, 1], "stale": [3, 2, 1, 0]} == (
        pipe.json()
    )
    assert pipe.bubble.share == pytest.approx(1 / 4)  # of two ticks as long as B a rank works 3 of 4
    assert pipelines.describe(pipe) == (
        "pipedream, 4 stages of 1 layer; never drains, one global batch in 2 ticks, bubble 25.0% of the time "
        "(F : B as 1 : 2); batches in flight and weight versions by rank: 4 3 2 1; gradient delay in updates by rank: "
        "3 2 1 0, of the head 2"
    )


def test_the_bubble_counts_recomputation():
    """(S-1)/(M+S-1) whatever B takes; interleaved, half of (S-1) in as much work."""
    for remat, backward in (("none", 2), ("dots", 2), ("block", 3), ("stage", 3)):
        one = config("1x1x4", microbatches=8, remat=remat)
        told = pipeline_of(Split(one, dict(laid(one).axes))).json()
        assert told["bubble"] == pytest.approx(3 / 11)
        assert told["backward_over_forward"] == backward
        assert told["in_flight"] == [7, 5, 3, 1]
    assert pipeline_of(Split(config("8x1x1"), dict(laid(config("8x1x1")).axes))) is None


def test_the_summary_tells_all_of_it(capsys):
    argv = ["--mesh=1x2x2", "--model.layers=5", "--model.vocab=2050", "--pipeline.microbatches=4"]
    assert train.main([*argv, "--model.remat=stage", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert (
        "pipeline    1f1b, 2 stages of 2 or 3 layers; 4 micro-batches in 6 ticks, bubble 20.0% of the time "
        "(F : B as 1 : 3); micro-batches in flight by rank: 3 1\n"
    ) in said
    assert "are padding" in said
    assert "vocabulary 2050 padded to 2052 in memory" in said
    assert "16 rows x 128 = 2,048 tokens per step, 4 micro-batches" in said


def test_remedies_know_micro_batches_and_stages():
    one = config("2x1x2", "gpipe", microbatches=2, remat="none", rows=256, vocab=512).model_copy(
        update={"run_dir": "run"}
    )
    sharded = sharded_by(one, models.build(one.model), laid(one))
    changes = dict(remedies._changes(sharded.split))
    assert changes == {
        "model.remat": "stage", "pipeline.schedule": "1f1b", "parallel.zero": 3, "pipeline.microbatches": 4
    }  # fmt: skip
    tried = [one.with_knobs(dict([change])) for change in remedies._changes(sharded.split)]
    assert [problem for other in tried for problem in problems(other, KNOBS)] == []
    told = remedies.fitting(sharded, memory.predict(sharded).total)
    assert all(units.size(memory.predict(sharded).total) not in line for line in told)
    assert any(line.startswith("pipeline.microbatches to 4 (") for line in told)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        ("1f1b", {"model.remat block", "model.remat stage", "pipeline.microbatches 4"}),
        ("zb-u", {"model.remat block", "pipeline.microbatches 4"}),
        ("zb-h1", {"pipeline.microbatches 4"}),
        ("pipedream", {"model.remat block", "model.remat stage"}),
    ],
)
def test_remedies_are_legal_with_the_schedule(schedule, told):
    asked = config("1x1x2", schedule, microbatches=1 if schedule == "pipedream" else 2, remat="none")
    assert {f"{name} {value}" for name, value in remedies._changes(Split(asked, dict(laid(asked).axes)))} == told


def test_a_person_is_told_in_one_line():
    one = config("1x1x2", "interleaved", layers=4)
    assert pipelines.describe(pipeline_of(Split(one, dict(laid(one).axes)))) == (
        "interleaved, 2 stages x 2 virtual stages of 1 layer; 4 micro-batches in 12 ticks, bubble 11.1% of the time "
        "(F : B as 1 : 3); chunks of micro-batches in flight by rank: 5 3"
    )
