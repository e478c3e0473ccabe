"""Several files as one source: what names them, in which order they are read, and what is left out."""

import os

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxdist.config import DataConfig
from jaxdist.data.naming.paths import open_sources, paths_of, places_of
from tests.data.files import POEM, ids, lines, open_


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Three files that are read, and others."""
    monkeypatch.chdir(tmp_path)
    files = {
        "web/b.jsonl": lines(*[f"the {i}th line of b" for i in range(20)]),
        "web/a.txt": POEM,
        "web/sub/c.txt": "the text of c\n" * 50,
        "web/README.md": "what these are",
        "web/empty.txt": "",
        "web/table.xlsx": "PK\x03\x04",
        "web/other.xlsx": "PK\x03\x04",
        "web/.hidden.txt": "hidden",
        "web/.git/config.txt": "hidden",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def named(text):
    return [str(path) for path in paths_of(text)]


def test_what_a_text_names(folder):
    (folder / "a,b*.txt").write_text("one file")
    (folder / "list.txt").write_text("web/b.jsonl\n\nlist.txt\nweb/a.txt\n")
    (folder / "web/beside.list.txt").write_text("b.jsonl\n")
    read = ["web/a.txt", "web/b.jsonl", "web/sub/c.txt"]
    assert named(None) == []
    assert named("web/a.txt") == ["web/a.txt"]
    assert named("a,b*.txt") == ["a,b*.txt"]
    assert named("web/b.jsonl, web/a.txt") == ["web/b.jsonl", "web/a.txt"]
    assert named("web/*.jsonl,web/sub") == ["web/b.jsonl", "web/sub/c.txt"]
    assert named("list.txt") == ["web/b.jsonl", "web/a.txt"]
    assert named("web/beside.list.txt") == ["web/b.jsonl"]
    os.remove("web/beside.list.txt")
    assert named("web") == named("web/") == read
    assert named("web/**/*.[tj]*") == read
    assert named("s3://web/*.txt,web/a.txt") == []


def test_a_folder_without_known_endings_is_texts(folder):
    for name, text in {"code/b.py": "b = 1\n", "code/a.c": "int a;\n", "code/.cache/x.py": "no"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    os.symlink("../code", "code/loop")
    assert named("code") == ["code/a.c", "code/b.py"]


def test_a_text_with_a_line_that_is_no_file_is_a_text(folder):
    (folder / "text.txt").write_text("web/a.txt\nand more\n")
    assert named("text.txt") == ["text.txt"]


def test_a_job_has_to_see_folders_lists_and_files(folder):
    (folder / "list.txt").write_text("web/a.txt\n")
    found = [str(path) for path in places_of("web,list.txt,web/*.jsonl,no.txt")]
    assert found == ["web", "list.txt", "web/a.txt", "web/b.jsonl"]


def test_each_file_of_a_folder_is_a_document(folder):
    (folder / "held.jsonl").write_text(lines("held out " * 20))
    corpus = open_(path="web", validation_path="held.jsonl")
    assert corpus.source.startswith("web, 3 files, 23 documents (2 .xlsx, 1 .txt, 1 .md left out), ")
    text = Tokenizer.from_str(corpus.tokenizer).decode(corpus.train.tokens.ids.tolist(), skip_special_tokens=False)
    wanted = [POEM, *[f"the {i}th line of b" for i in range(20)], "the text of c\n" * 50]
    assert text == "".join(document + "<|endoftext|>" for document in wanted)


def test_the_same_files_have_the_same_tokens_however_they_are_named(folder):
    (folder / "list.txt").write_text("web/a.txt\nweb/b.jsonl\nweb/sub/c.txt\n")
    texts = ("web", "web/a.txt,web/b.jsonl,web/sub", "web/**/*.[tj]*", "list.txt")
    corpora = [open_(path=text) for text in texts]
    assert len({corpus.fingerprint for corpus in corpora}) == 1
    assert all(np.array_equal(corpus.train.tokens.ids, corpora[0].train.tokens.ids) for corpus in corpora)
    assert open_(path="web/b.jsonl,web/a.txt,web/sub").fingerprint != corpora[0].fingerprint


def test_one_file_is_the_same_data_however_it_is_named(folder):
    for name in ("web/a.txt", "web/b.jsonl"):
        alone = open_(path=name, validation_fraction=0.5)
        (folder / "list.txt").write_text(f"{name}\n")
        for text in (name.replace("web", "w?b"), "list.txt"):
            assert open_(path=text, validation_fraction=0.5).fingerprint == alone.fingerprint


def test_a_run_that_read_a_list_as_a_text_goes_on(folder):
    names = [f"part-{number:03}.txt" for number in range(99)]
    (folder / "list.txt").write_text("".join(f"{name}\n" for name in names))
    begun = open_(path="list.txt", validation_fraction=0.5).fingerprint
    for name in names:
        (folder / name).write_text(f"the text of {name}\n")
    assert len(open_sources(DataConfig(path="list.txt")).training.files) == 99
    assert open_(path="list.txt", validation_fraction=0.5).fingerprint != begun
    resumed = open_(path="list.txt", validation_fraction=0.5, begun=begun)
    assert resumed.fingerprint == begun
    assert resumed.source.startswith("list.txt, ")


def test_forms_of_text_may_be_mixed_between_training_and_validation(folder):
    corpus = open_(path="web/b.jsonl", validation_path="web/sub,web/a.txt")
    text = Tokenizer.from_str(corpus.tokenizer).decode(corpus.validation.tokens.ids.tolist())
    assert text == "the text of c\n" * 50 + POEM


def test_a_folder_of_one_file_of_tokens(folder):
    (folder / "tokens").mkdir()
    (folder / "tokens/train.bin").write_bytes(ids(*range(299), 1))
    assert open_(path="tokens", validation_fraction=0.1).train.tokens.length == 270
