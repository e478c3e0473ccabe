"""The table of docs/how-to/fine-tuning-sizes.md is what its script makes; when `plan` predicts otherwise, run that.

python scripts/fine_tuning_sizes.py
"""

import importlib.util

import pytest

from tests.test_docs import ROOT


@pytest.fixture(scope="module")
def sizes():
    spec = importlib.util.spec_from_file_location("fine_tuning_sizes", ROOT / "scripts" / "fine_tuning_sizes.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cells(sizes):
    """What the page says, by model and way, and by place."""
    _, (head, _, *rows), _ = sizes.parts(sizes.PAGE.read_text())
    places = [place.strip() for place in head.strip("|").split("|")][1:]
    found = {}
    for row in rows:
        name, *texts = [text.strip() for text in row.strip("|").split("|")]
        found |= {(*name.split(", "), place): text for place, text in zip(places, texts, strict=True)}
    return found


def test_the_table_has_a_cell_for_each_model_way_and_place(sizes, cells):
    assert [*cells] == [(model, way, place) for model in sizes.MODELS for way in sizes.WAYS for place in sizes.PLACES]


@pytest.mark.parametrize(
    "asked", [("0.6B", "QLoRA", "1 x RTX 4090"), ("8B", "LoRA", "8 x H100"), ("8B", "all weights", "1 x H100")]
)
def test_a_cell_is_what_plan_says(sizes, cells, asked):
    """To a fifth of the memory: activations are estimates, which are mended now and then."""
    there, made = cells[asked], sizes.cell(*asked)
    if "-" in (there, made):
        assert there == made == "-"
        return
    memory = [float(text.split(" GiB")[0]) for text in (there, made)]
    assert memory[0] == pytest.approx(memory[1], rel=0.2)
