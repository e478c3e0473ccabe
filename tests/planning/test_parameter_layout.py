"""Where every parameter lies, told before anything is allocated: the listing, what stays whole, `--dry-run`."""

import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from jaxdist import models, train
from jaxdist.config import Config, ModelConfig, ParallelConfig, RequestError, TrainConfig
from jaxdist.explaining.report import Report
from jaxdist.mesh import abstract_mesh, parse_mesh
from jaxdist.mesh.split import Split
from jaxdist.parallel.placing import ZeroOptions, placements
from jaxdist.planning import layout_notes, memory, parameter_layout
from jaxdist.sharding import Layout, rules
from tests.planning.sharded import sharded_by


class Plan:
    def __init__(
        self, mesh: str, zero: int, sequence: bool = False, rows: int = 16, context: str = "auto", **model: object
    ):
        sizes = ModelConfig(**{"layers": 2, "embed": 32, "heads": 4, "vocab": 96, "sequence": 16} | model)
        parallel = ParallelConfig(zero=zero, sequence=sequence, context=context)
        train = TrainConfig(global_batch_size=rows)
        self.config = Config(mesh=mesh, precision="float32", model=sizes, parallel=parallel, train=train)
        shape = parse_mesh(mesh)
        split = rules(Split(self.config, shape))
        axes = {name: size for name, size in shape.items() if size > 1}
        by = {logical: tuple(axis for axis in axes if axis in names) for logical, names in split.items()}
        self.layout = Layout(tuple(axes.items()), "cpu", tuple(by.items()))
        self.sharded = sharded_by(self.config, models.build(sizes, self.layout), self.layout)
        self.parameters = self.sharded.parameters
        self.notes = layout_notes.notes(self.sharded)

    def row(self, name: str) -> list[str]:
        held = [memory.state(self.config, p) for p in self.parameters]
        table = parameter_layout.listing(self.parameters, held)
        (row,) = (line for line in table if line.startswith(name + " "))
        return re.split(r" {2,}", row)


def test_the_listing_tells_shape_axes_layout_and_bytes():
    plan = Plan("4x2x1", zero=1)
    assert plan.row("table") == ["table", "96x32", "vocab embed", "model data", "model -", f"{96 * 32 * 12 // 8:,}"]
    assert plan.row("norm.scale") == ["norm.scale", "32", "norm", "data", "-", f"{32 * 12 // 4}"]
    assert Plan("4x2x1", zero=0).row("table")[3:5] == ["model -", "same"]


def test_the_listing_tells_which_parameters_are_frozen():
    plan = Plan("2x1x1", zero=1, family="llama", mlp=64, lora_rank=4, lora_base="bfloat16")
    assert plan.row("table")[-2:] == ["frozen", f"{96 * 32 * 2 // 2:,}"]
    assert plan.row("blocks.mlp.lora.up_proj.a")[-2:] == ["yes", f"{2 * 32 * 4 * 12 // 2:,}"]
    assert len(Plan("2x1x1", zero=1).row("table")) == 6


@pytest.mark.parametrize("mesh", ["replica=2,data=2,model=2", "2x2x2"])
def test_parameters_lie_alike_from_stage_1_on(mesh):
    places = []
    for stage in range(4):
        plan = Plan(mesh, zero=stage, heads=4, family="llama", kv_heads=1, mlp=64)
        axes, abstract = plan.sharded.model.axes, plan.sharded.model.abstract
        places.append(placements(plan.layout, axes, abstract, ZeroOptions.of(plan.sharded.split)))
    assert places[0] != places[1] == places[2] == places[3]


def test_the_bytes_of_the_listing_add_up_to_the_prediction():
    plan = Plan("2x2x1", zero=3, sequence=True)
    held = memory.predict(plan.sharded)
    listed = sum(memory.state(plan.config, p) for p in plan.parameters)
    assert listed == held.parameters + held.optimizer - 20  # counters


def test_a_little_that_stays_whole_is_named():
    (note,) = Plan("2x2x1", zero=1, mlp=32).notes
    assert note.startswith("data=2 finds no dim to split in blocks.mlp.up_bias (2x32): 0.")
    assert "warning" not in note


def test_much_that_stays_whole_is_a_warning_with_sizes_that_work():
    (note,) = Plan("8x1x1", zero=2, embed=36).notes
    assert note.startswith("warning: data=8 finds no dim to split in blocks.attention.out (2x4x9x36), ")
    assert note.endswith("set model.embed to 32 or 40, or data to 4")
    for embed in (32, 40):
        assert not any("warning" in note for note in Plan("8x1x1", zero=2, embed=embed).notes)
    assert not any("warning" in note for note in Plan("4x1x1", zero=2, embed=36).notes)


def test_a_width_apart_from_the_heads_is_offered_in_smaller_steps():
    """With a head_dim, the width need not divide by the heads."""
    (note,) = Plan("8x1x1", zero=2, embed=36, family="llama", heads=16, head_dim=10, mlp=36).notes
    assert note.startswith("warning: data=8 finds no dim to split in ")
    assert "set model.embed to 32 or 40" in note


def test_explain_names_what_stays_whole(monkeypatch):
    """In the words of the summary, beside what it says of the compiled program; then what the mesh does not use."""
    plan = Plan("8x1x1", zero=2, embed=36, context="ring")
    mesh = abstract_mesh(parse_mesh("8x1x1"))
    monkeypatch.setattr(Report, "collectives", [])
    program = SimpleNamespace(notes=("compiled so",))
    report = Report(plan.sharded, mesh, program, None, None)
    not_used = "parallel.context is ring, but mesh 8x1x1, whose context axis is 1, does not use it"
    assert report.notes == ["compiled so", *plan.notes, not_used]
    assert report.notes[1].startswith("warning: data=8 finds no dim to split in ")


def test_a_classifier_of_images_is_offered_what_its_family_has():
    """It has no model.embed; of 7 rows no other number of data ranks works."""
    (note,) = Plan("7x1x1", zero=3, family="cnn").notes
    assert note.startswith("warning: data=7 finds no dim to split in head.bias (10), head.kernel (128x10), ")
    assert note.endswith("100.00% of the parameters are left to every device; set data to 4 or 8")
    for data in (4, 8):
        assert not any("warning" in note for note in Plan(f"{data}x1x1", zero=3, family="cnn").notes)
    (note,) = Plan("7x1x1", zero=3, family="cnn", rows=7).notes
    assert note.endswith("100.00% of the parameters are left to every device")


def test_what_splits_nothing_is_said():
    assert Plan("1x1x1", zero=3).notes == ["parallel.zero 3 splits nothing here, because data is 1"]
    assert Plan("4x1x1", zero=0).notes == Plan("1x1x1", zero=0).notes == []


def test_dry_run_tells_and_does_nothing(tmp_path):
    """In a process of its own, on however many devices there are; 4 times the promised 15 s stand for a hang."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxdist.train", "llama_70b", "--mesh=data=64,model=8", "--dry-run"],
        cwd=tmp_path, env=os.environ, timeout=60, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for fragment in ("512 x ", "data=64 model=8", "128256x8192", "model data", "memory ", "not read"):
        assert fragment in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_dry_run_of_one_device_says_that_nothing_is_split(capsys):
    assert train.main(["--mesh=1x1x1", "--dry-run"]) == 0
    said = capsys.readouterr().out
    for fragment in ("1,071,872 parameters", "every parameter lies whole on every device", "memory ", "not read"):
        assert fragment in said


def test_dry_run_fills_the_mesh_and_takes_more_devices_than_there_are(capsys):
    assert train.main(["--mesh=2x-1x1", "--dry-run"]) == 0
    assert "data=2" in capsys.readouterr().out
    assert train.main(["--mesh=128x4x1", "--parallel.zero=3", "--train.global-batch-size=128", "--dry-run"]) == 0
    assert "data=128 model=4" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_says_where_everything_lies(capsys, tmp_path):
    """Before its first step, as `--dry-run` does."""
    text = tmp_path / "text.txt"
    text.write_text("some words to learn from; " * 400)
    options = ["--model.layers=1", "--model.embed=16", "--model.heads=2", "--model.vocab=300", "--model.sequence=16"]
    options += ["--mesh=2x1x1", "--parallel.zero=1", "--train.steps=1", "--log.tensorboard=false"]
    assert train.main([*options, f"--data.path={text}", f"--run-dir={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().err
    assert re.search(r"\n +table +300x16 +vocab embed +data - +- - +28,800\n", said)


def dry_run(capsys, *argv: str) -> dict[str, str]:
    """The first line of each part of the summary, by its name."""
    assert train.main([*argv, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {line[:11].strip(): line[12:] for line in lines if line[:11].strip()}


def test_a_dry_run_names_the_gpus_that_are_large_enough(capsys):
    """Of 97 GiB on each device: those with more for JAX, smallest first."""
    said = dry_run(capsys, "llama_70b", "--mesh=data=64,model=8")
    assert said["memory"].startswith("97.3 GiB of unknown capacity")
    large = "h200 (128.6 GiB), b200 (164.1 GiB), gb200 (169.6 GiB), b300 (254.5 GiB)"
    assert said["would fit"].startswith(f"{large} of the GPUs a100, ")


def test_a_dry_run_tells_of_experts_and_of_what_is_active(capsys):
    """Published: 46.7 billion parameters, of which a token uses 12.9 (Jiang et al. 2024, section 1)."""
    said = dry_run(capsys, "mixtral_8x7b", "--mesh=data=8,expert=8", "--target=h100")
    assert said["model"] == "46,702,792,704 parameters, 12,879,925,248 of them active for a token"
    # Of the lines of experts, the last one.
    assert "the first round computes" in said["experts"]
    assert "(output table included, 2 of 8 experts)" in said["arithmetic"]


def test_a_dry_run_says_that_no_gpu_is_large_enough(capsys):
    assert dry_run(capsys, "llama_70b")["would fit"].startswith("none of the GPUs a100, a100-40, gh200, h100, ")


def test_a_dry_run_compares_with_a_gpu(capsys):
    small = dry_run(capsys, "--target=h100")
    assert small["devices"] == "1 x NVIDIA H100 80GB HBM3 (gpu), not here"
    assert "precision bfloat16" in small["mesh"]
    assert " of 72.8 GiB per device predicted" in small["memory"]
    assert not {"would fit", "warning"} & set(small)
    large = dry_run(capsys, "llama_70b", "--mesh=data=64,model=8", "--target=h100")
    assert "predicted may not fit into 72.8 GiB; set " in large["warning"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--target=h100"], "--target h100 is valid with --dry-run only"),
        (["--target=h1000", "--dry-run"], "target 'h1000' is not known; did you mean 'h100'"),
    ],
)
def test_a_target_that_cannot_be(argv, words):
    with pytest.raises(RequestError, match=words):
        train.main(argv)


def test_replicas_split_the_dim_of_data_where_both_divide_it_and_another_elsewhere():
    plan = Plan("replica=2,data=4", zero=3)
    assert plan.row("table")[3:5] == ["data+replica -", "- -"]
    assert plan.row("norm.scale")[3:] == ["data+replica", "-", f"{32 * 12 // 8}"]
    odd = Plan("replica=2,data=4", zero=1, embed=36, mlp=64)
    assert odd.row("blocks.mlp.up")[3:5] == ["- data replica", "- - -"]
    assert odd.row("norm.scale")[3:] == ["data", "-", f"{36 * 12 // 4}"]  # 36 / 4 has no half, and no dim is left
    assert not odd.notes


@pytest.mark.parametrize(
    ("mesh", "zero", "changes", "why"),
    [
        ("replica=2,data=2", 0, {}, "ZeRO 0 splits no state"),
        ("replica=2,data=2,pipeline=2", 1, {"pipeline.schedule": "pipedream"}, "PipeDream updates"),
        ("replica=5", 1, {}, "no parameter has a dim that replica=5 divides"),
    ],
)
def test_a_note_says_why_replicas_split_nothing(mesh, zero, changes, why):
    plan = Plan(mesh, zero, rows=80)
    sharded = plan.sharded.with_knobs(changes)
    (note,) = (one for one in layout_notes.notes(sharded) if "replica_zero" in one)
    assert note.startswith("each replica holds all masters and moments")
    assert why in note
