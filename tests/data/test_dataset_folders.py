"""Data sets of Hugging Face on disk: what `save_to_disk` writes, and files with the names that they have on the hub."""

import json

import numpy as np
import pyarrow as pa
import pytest

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.naming.paths import open_sources
from tests.data.column_files import arrow, parquet
from tests.data.files import POEM, ids, lines, open_


def table(*texts: str) -> pa.Table:
    return pa.table({"text": list(texts)})


def save(folder, **files: list[str]) -> None:
    """As `save_to_disk` does, files of texts in this order."""
    folder.mkdir(parents=True)
    for name, texts in files.items():
        (folder / f"{name}.arrow").write_bytes(arrow(table(*texts)))
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"{name}.arrow"} for name in files]}))
    (folder / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string", "_type": "Value"}}}')


def texts_of(path, **knobs) -> tuple[list[str], list[str] | None]:
    """The texts to train on, and those that are validation by their names."""
    sources = open_sources(DataConfig(path=path, **knobs))
    held_out = sources.held_out and [document.text for document in sources.held_out.documents()]
    return [document.text for document in sources.training.documents()], held_out


def test_shards_are_read_in_the_order_that_is_saved(tmp_path):
    save(tmp_path / "saved", b=["one", "two"], a=["three"])
    (tmp_path / "saved" / "cache-1234.arrow").write_bytes(arrow(table("of a map")))
    assert texts_of(tmp_path / "saved") == (["one", "two", "three"], None)
    # Also below another folder, among texts.
    (tmp_path / "a.txt").write_text("a text")
    (tmp_path / "t.txt").write_text("the last text")
    assert texts_of(tmp_path)[0] == ["a text", "one", "two", "three", "the last text"]


def test_saved_splits_are_training_and_validation(tmp_path):
    for split in ("train", "validation", "test"):
        save(tmp_path / "saved" / split, data=[f"{split} {i} is a text of some length" for i in range(9)])
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train", "validation", "test"]}')
    corpus = open_(path=tmp_path / "saved")
    held_out = tmp_path / "saved/validation/data.arrow"
    assert corpus.source.startswith(f"{tmp_path / 'saved'}, 18 documents (1 .json, 1 .arrow left out), ")
    assert f" held out in {held_out}, byte-level BPE" in corpus.source
    named = open_(path=tmp_path / "saved/train", validation_path=tmp_path / "saved/validation")
    assert named.fingerprint == corpus.fingerprint
    assert np.array_equal(named.validation.tokens.ids, corpus.validation.tokens.ids)
    other = tmp_path / "other.txt"
    other.write_text(POEM)
    assert "(2 .arrow, 1 .json left out)" in open_(path=tmp_path / "saved", validation_path=other).source


LAYOUTS = {
    "data": ["data/train-00000-of-00002-ab12.parquet", "data/train-00001-of-00002-ab12.parquet"],
    "validation": ["data/train-00000-of-00001.parquet", "data/validation-00000-of-00001.parquet"],
    "folders": ["plain/train/0000.parquet", "plain/dev/0000.parquet", "plain/test/0000.parquet"],
    "words": ["train_sft.parquet", "test_sft.parquet", "eval-gen.parquet", "valid.arrow"],
    "name first": ["test-suite/train-0.parquet", "train/validation-0.parquet", "tests/latest.parquet"],
    "no words": ["a/0.parquet", "b/evaluate.parquet"],
    "test alone": ["data/test-0.parquet"],
}
WANTED = {
    "data": (LAYOUTS["data"], []),
    "validation": (LAYOUTS["validation"][:1], LAYOUTS["validation"][1:]),
    "folders": (["plain/train/0000.parquet"], ["plain/dev/0000.parquet"]),
    "words": (["train_sft.parquet"], ["valid.arrow"]),
    "name first": (["test-suite/train-0.parquet", "tests/latest.parquet"], ["train/validation-0.parquet"]),
    "no words": (LAYOUTS["no words"], []),
    "test alone": (LAYOUTS["test alone"], []),
}


def test_what_datasets_has_made_of_a_data_set_is_no_part_of_it(tmp_path):
    for name in ("a-train", "a-validation", "cache-0f56d554530ef268", "cache-0f56d554530ef268_00001_of_00004"):
        (tmp_path / f"{name}.arrow").write_bytes(arrow(table(name)))
    assert texts_of(tmp_path) == (["a-train"], ["a-validation"])


@pytest.mark.parametrize("pattern", ["", "**/*.*"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_the_splits_of_the_hub_are_known_by_names(tmp_path, case, pattern):
    root = tmp_path / "test"  # the name of the data set itself says nothing
    for name in LAYOUTS[case]:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(parquet(table(name)))
    if not pattern:
        (root / "README.md").write_text("# A card")
        (root / ".gitattributes").write_text("*.parquet filter=lfs")
    train, held_out = WANTED[case]
    found = texts_of(root / pattern if pattern else root)
    assert (sorted(found[0]), found[1] or []) == (sorted(train), held_out)


def test_names_of_other_texts_say_nothing(tmp_path):
    """They did not when runs began with them."""
    for name in ("train.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text(lines(name))
    assert texts_of(tmp_path) == (["train.jsonl", "validation.jsonl"], None)


def test_what_is_named_by_itself_is_trained_on(tmp_path):
    for name in ("train.parquet", "test.parquet"):
        (tmp_path / name).write_bytes(parquet(table(name)))
    assert texts_of(tmp_path / "test.parquet") == (["test.parquet"], None)
    assert texts_of(f"{tmp_path / 'train.parquet'},{tmp_path / 'test.parquet'}")[0] == ["train.parquet", "test.parquet"]


def test_a_run_that_left_splits_out_goes_on(tmp_path):
    root = tmp_path / "web"
    root.mkdir()
    (root / "a.txt").write_text(POEM)
    begun = open_(path=root).fingerprint
    for name in ("train", "validation"):
        (root / f"{name}.parquet").write_bytes(parquet(table(*POEM.splitlines())))
    assert open_(path=root).fingerprint != begun
    assert open_(path=root, begun=begun).fingerprint == begun


def test_tokens_and_rows_are_two_kinds(tmp_path):
    (tmp_path / "a.bin").write_bytes(ids(*range(99)))
    (tmp_path / "train.parquet").write_bytes(parquet(table("a")))
    with pytest.raises(RequestError, match=r"names tokens, '.*bin', and text, '.*parquet'; give files of one kind"):
        open_(path=tmp_path)
