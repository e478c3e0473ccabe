"""A file of columns is divided between its groups of rows, or its batches, so that several processes read it."""

import io
from itertools import chain
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyarrow import ipc

from jaxdist.config import RequestError
from jaxdist.data.readers.arrow_messages import stored_batches
from jaxdist.data.readers.parquet import _groups
from jaxdist.data.readers.reader import every_step
from jaxdist.data.skipped import Skipped
from jaxdist.data.sources import Source
from tests.data.column_files import WRITERS, arrow, arrow_file, parquet

TEXTS = [f"the {i}th text äöü 日本 🙂 " * (i % 7) for i in range(600)]
TABLE = pa.table({"other": range(600), "text": TEXTS})
DOCUMENTS = [text for text in TEXTS if text]

DIVIDED = {
    "parquet": parquet(TABLE, row_group_size=50),
    "parquet, plain": parquet(TABLE, row_group_size=50, compression="none", use_dictionary=False),
    "stream": arrow(TABLE, rows=50),
    "stream, compressed": arrow(TABLE, rows=50, options=ipc.IpcWriteOptions(compression="zstd")),
    "file": arrow_file(TABLE, rows=50),
    "file, compressed": arrow_file(TABLE, rows=50, options=ipc.IpcWriteOptions(compression="lz4")),
}


def stretches(file, step):
    """Return the texts from each place to the next one, and the bytes that are counted as they are read."""
    found, read = [], []
    starts = [0, *file.places(step)]
    for start, stop in zip(starts, [*starts[1:], None], strict=True):
        read.append([])
        found.append([document.text for document in file.documents(read[-1].append, start, stop)])
        assert sum(read[-1]) == (stop or file.path.stat().st_size) - start
    return found


@pytest.mark.parametrize("step", [1, 2000, 10_000])
@pytest.mark.parametrize("content", DIVIDED.values(), ids=list(DIVIDED))
def test_the_parts_are_the_whole(write, content, step):
    (file,) = Source.of(write("a", content)).texts()
    found = stretches(file, step)
    assert list(chain(*found)) == DOCUMENTS
    if step == 1:
        assert found == [[text for text in TEXTS[i : i + 50] if text] for i in range(0, 600, 50)]
    else:
        places = list(file.places(step))
        assert len({place // step for place in places}) == len(places) < 12
        assert len(found) > 1 or len(content) <= 2 * step


def test_a_place_is_the_first_after_each_step():
    assert list(every_step([1, 5, 25, 26, 31, 70], 10)) == [25, 31, 70]
    assert list(every_step([], 10)) == []


@pytest.mark.parametrize("ending", WRITERS)
def test_a_row_is_named_by_its_number_in_the_file(write, ending):
    rows = [*TEXTS[:590], None, *TEXTS[590:]]
    (file,) = Source.of(write(f"a{ending}", WRITERS[ending](pa.table({"text": rows})))).texts()
    *_, last = file.places(1)
    with pytest.raises(RequestError, match=r"^row 591 of '.*' has null"):
        list(file.documents(start=last))
    skips = Skipped(skips=True)
    assert [document.text for document in file.documents(start=last, rows=skips)] == [t for t in rows[500:] if t]
    assert skips.first.startswith("row 591 of ")


def test_batches_that_share_a_dictionary_are_read_by_one(write):
    table = pa.table({"text": pa.array(TEXTS).dictionary_encode()})
    for content in (arrow(table, rows=50), arrow_file(table, rows=50)):
        (file,) = Source.of(write("a.arrow", content)).texts()
        assert list(file.places(1)) == []
        assert [document.text for document in file.documents()] == DOCUMENTS
    (file,) = Source.of(write("a.parquet", parquet(table, row_group_size=50))).texts()
    assert list(chain(*stretches(file, 1))) == DOCUMENTS
    assert len(list(file.places(1))) == 11


def test_several_streams_are_refused_wherever_they_are_divided(write):
    (file,) = Source.of(write("a.arrow", arrow(TABLE) * 2)).texts()
    with pytest.raises(RequestError, match="holds several streams"):
        stretches(file, 1)


@pytest.mark.parametrize("content", [arrow(TABLE), arrow_file(TABLE)], ids=["stream", "file"])
def test_messages_that_are_not_whole_are_no_places(content):
    start = 8 if content.startswith(b"ARROW1") else 0
    batches = stored_batches(io.BufferedReader(io.BytesIO(content)), start)
    assert [batch.rows for batch in batches] == [250, 250, 100]
    head = batches[0].start
    for damaged in (
        *(content[:size] for size in range(0, head + 300, 7)),
        *(content[:place] + b"\x80" + content[place + 1 :] for place in range(start, head + 200)),
        *(content[:place] + b"\xff" * 8 + content[place + 8 :] for place in range(start, head + 200, 4)),
    ):
        # It ends, and raises nothing; what is wrong is said by who reads the rows.
        stored_batches(io.BufferedReader(io.BytesIO(damaged)), start)
        assert len(damaged) == len(content) or not stored_batches(io.BufferedReader(io.BytesIO(damaged)), start)


@pytest.mark.parametrize("starts", [(4, 90, 60), (4, 50, 50), (-1, 50, 90), (4, 50, 100)])
def test_groups_that_do_not_lie_in_order_are_read_by_one(starts):
    groups = [
        SimpleNamespace(num_rows=7, column=lambda _, start=start: SimpleNamespace(data_page_offset=start))
        for start in starts
    ]
    file = SimpleNamespace(num_row_groups=3, metadata=SimpleNamespace(row_group=groups.__getitem__))
    assert [group.start for group in _groups(file, 100)] == [0, 0, 0]
    assert [group.start for group in _groups(file, 101)] == (list(starts) if starts[2] == 100 else [0, 0, 0])
