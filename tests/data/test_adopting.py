"""What was tokenized before a file was refused is not tokenized again when that file is mended, or taken away."""

import gzip

import pytest

from jaxdist.config import RequestError
from jaxdist.data.tokenizing import pieces, token_store
from jaxdist.data.tokenizing.encoder import PIECES, Encoder
from jaxdist.data.tokenizing.pieces import Plan
from tests.data.files import lines, open_, save_tokenizer

PIECE = 3000
FILES = 6


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE", PIECE)
    monkeypatch.setattr(token_store, "core_count", lambda: 1)


def text(number):
    return lines(*(f"w{number} w{i} " + f"w{i % 7} " * (i % 40) for i in range(200)))


@pytest.fixture
def written(write, tmp_path):
    """A folder of files of several pieces each, and how it is opened."""
    (tmp_path / "web").mkdir()
    for number in range(FILES):
        write(f"web/{number}.jsonl", text(number))
    return tmp_path / "web", {"path": tmp_path / "web", "tokenizer": save_tokenizer(tmp_path / "t.json")}


def opened(knobs, monkeypatch, kept=True):
    """The files of the cache, how many pieces there are, and how many were written."""
    plans, seen, write = [], [], Encoder.write
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "write", lambda self, *more: (seen.append(more[0]), write(self, *more)))
        patch.setattr(Plan, "write", lambda plan, folder: plans.append(plan))
        folder = open_(**knobs).train.tokens.path.parent
    if kept:
        assert [one.name for one in folder.parent.iterdir()] == [folder.name]  # nothing else is left
    return {file.name: file.read_bytes() for file in folder.iterdir()}, len(plans[0].pieces), len(seen)


def refused(knobs, match):
    with pytest.raises(RequestError, match=match):
        open_(**knobs)


def from_scratch(knobs, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setenv("JAXDIST_CACHE", str(tmp_path / "scratch"))
        return opened(knobs, monkeypatch)


@pytest.mark.parametrize("place", [0, 3, FILES - 1])
@pytest.mark.parametrize("then", ["mended", "removed", "skipped"])
def test_pieces_of_other_files_are_kept(written, tmp_path, monkeypatch, place, then):
    folder, knobs = written
    wrong = folder / f"{place}.jsonl"
    wrong.write_text(text(place) + '{"text": "cut')
    refused(knobs, rf"line 201 of '.*{place}.jsonl' is not JSON")
    refused(knobs, rf"line 201 of '.*{place}.jsonl' is not JSON")
    if then == "mended":
        wrong.write_text(text(place))
    elif then == "removed":
        wrong.unlink()
    else:
        # Rows that are bad are read in another way, so that all is made again.
        knobs = {**knobs, "on_error": "skip"}
    files, count, written_again = opened(knobs, monkeypatch, kept=place > 0 and then != "skipped")
    scratch, same_count, all_of_them = from_scratch(knobs, monkeypatch, tmp_path)
    assert files == scratch
    assert all_of_them == count == same_count
    before = place * count // (FILES - (then == "removed"))
    if then == "skipped":
        assert written_again == count
    else:
        # One process stops at the first file that is wrong: what comes after it was never made.
        assert count - before <= written_again <= count - before + 2


def test_several_processes_leave_what_lies_behind_too(written, tmp_path, monkeypatch):
    """Pieces that are finished in any order, some of which are not in shards yet."""
    folder, knobs = written
    wrong = folder / "1.jsonl"
    wrong.write_text(text(1) + '{"text": "cut')
    tried = Encoder.write

    def write(self, piece, *more):
        # Others write all that comes behind, and then the one that is wrong is found.
        if piece == piece_of_wrong:
            for later in range(piece + 1, len(self._plan.pieces)):
                tried(self, later)
        tried(self, piece, *more)

    plans = []
    with monkeypatch.context() as patch:
        patch.setattr(Plan, "write", lambda plan, folder: plans.append(plan))
        piece_of_wrong = -1
        refused(knobs, "line 201")
    piece_of_wrong = next(
        number
        for number in range(len(plans[0].pieces))
        if any(file.path == wrong and stop is None for file, _, stop in plans[0]._ranges(number))
    )
    with monkeypatch.context() as patch:
        patch.setattr(Encoder, "write", write)
        refused(knobs, "line 201")
    wrong.write_text(text(1))
    files, count, written_again = opened(knobs, monkeypatch)
    scratch, _, all_of_them = from_scratch(knobs, monkeypatch, tmp_path)
    assert files == scratch
    assert all_of_them == count
    assert 1 <= written_again <= count // FILES + 2


def test_a_compressed_file_that_is_cut_costs_only_itself(written, write, tmp_path, monkeypatch):
    folder, knobs = written
    (folder / "2.jsonl").unlink()
    whole = gzip.compress(text(2).encode())
    wrong = write("web/2.jsonl.gz", whole[: len(whole) // 2])
    refused(knobs, "2.jsonl.gz' is cut short")
    wrong.write_bytes(whole)
    files, count, written_again = opened(knobs, monkeypatch)
    scratch, *_ = from_scratch(knobs, monkeypatch, tmp_path)
    assert files == scratch
    assert 0.5 * count < written_again < 0.75 * count


def test_what_is_damaged_in_the_cache_is_made_again(written, tmp_path, monkeypatch, cache):
    folder, knobs = written
    wrong = folder / "3.jsonl"
    wrong.write_text(text(3) + '{"text": "cut')
    refused(knobs, "line 201")
    (left,) = cache.iterdir()
    shard = left / "train-000002.bin"
    content = bytearray(shard.read_bytes())
    content[3] ^= 1
    shard.write_bytes(content)
    wrong.write_text(text(3))
    files, count, written_again = opened(knobs, monkeypatch)
    scratch, *_ = from_scratch(knobs, monkeypatch, tmp_path)
    assert files == scratch
    assert count // 2 < written_again < 0.6 * count
    assert not (left / PIECES).exists()


@pytest.mark.parametrize("other", ["tokenizer", "fraction"])
def test_nothing_is_kept_for_other_tokens(written, tmp_path, monkeypatch, other):
    folder, knobs = written
    wrong = folder / "3.jsonl"
    wrong.write_text(text(3) + '{"text": "cut')
    refused(knobs, "line 201")
    wrong.write_text(text(3))
    if other == "tokenizer":
        knobs = {**knobs, "tokenizer": save_tokenizer(tmp_path / "other.json", 250)}
    else:
        knobs = {**knobs, "validation_fraction": 0.25}
    with monkeypatch.context() as patch:
        seen, write = [], Encoder.write
        patch.setattr(Encoder, "write", lambda self, *more: (seen.append(more[0]), write(self, *more)))
        folder = open_(**knobs).train.tokens.path.parent
    found = {file.name: file.read_bytes() for file in folder.iterdir()}
    scratch, count, _ = from_scratch(knobs, monkeypatch, tmp_path)
    assert found == scratch
    assert len(seen) == count


def test_tokens_in_shards_are_taken_only_behind_the_same_documents(written, tmp_path, monkeypatch):
    """With another file away, other documents are held out, by their numbers."""
    folder, knobs = written
    wrong = folder / "3.jsonl"
    wrong.write_text(text(3) + '{"text": "cut')
    refused(knobs, "line 201")
    wrong.write_text(text(3))
    (folder / "0.jsonl").unlink()
    files, *_ = opened(knobs, monkeypatch, kept=False)
    assert files == from_scratch(knobs, monkeypatch, tmp_path)[0]
