"""Compressed text has the tokens of the text inside, and a cut or damaged file is refused, never read short."""

import bz2
import gzip
import lzma
import sys
import tracemalloc

import numpy as np
import pytest

from jaxdist.config import RequestError
from jaxdist.data.__main__ import main
from jaxdist.data.compressed import decompressed, ending_of
from jaxdist.data.readers.reader import unseen
from tests.data.files import POEM, lines, open_

zstd = pytest.importorskip("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")

WAYS = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress, ".zst": zstd.compress}
NOISE = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8).tobytes()


def content(path, on_read=unseen) -> bytes:
    """The content. Fails where the end of the file is read again and again."""
    ends = []

    def counted(count: int) -> None:
        on_read(count)
        if count == 0:
            ends.append(path)
            assert len(ends) < 9, "it is read on beyond its end"

    with path.open("rb") as file:
        return decompressed(file, path, counted).read()


def long_window(data: bytes) -> bytes:
    """As `zstd --long=29` writes it, whose window is beyond what zstd reads by default."""
    parameter = zstd.CompressionParameter
    options = {parameter.enable_long_distance_matching: 1, parameter.window_log: 29}
    # The size is unknown at the start, as in a pipe; the window is not lowered to it.
    stream = zstd.ZstdCompressor(options=options)
    return stream.compress(data) + stream.flush()


@pytest.mark.parametrize("ending", WAYS)
def test_tokens_are_those_of_the_text_inside(write, ending):
    held_out = write("held_out.txt", POEM)
    texts = {"a.txt": POEM, "a.jsonl": lines(*POEM.splitlines())}
    for name, text in texts.items():
        wanted = open_(path=write(name, text), validation_path=held_out)
        for compressed in (name + ending, name):
            found = open_(path=write(compressed, WAYS[ending](text.encode())), validation_path=held_out)
            assert found.fingerprint != wanted.fingerprint
            assert np.array_equal(found.train.tokens.ids, wanted.train.tokens.ids)


def test_the_form_inside_is_known_by_the_name_inside(write, tmp_path):
    assert [str(ending_of(write(name, ""))) for name in ("a.jsonl.GZ", "a.txt", "a.gz", "a.tar")] == [
        ".jsonl",
        ".txt",
        "",
        ".tar",
    ]
    corpus = open_(path=write("rows.json.gz", gzip.compress(lines(*["a text of a row"] * 99).encode())))
    assert "99 documents" in corpus.source
    # Servers and browsers decompress files, and keep the name.
    assert "99 documents" in open_(path=write("plain.jsonl.gz", lines(*["a text of a row"] * 99))).source
    for name, data in {
        "b.txt.zst": zstd.compress(POEM.encode()),
        "c.md": b"no",
        "d.jsonl": lines("x").encode(),
    }.items():
        (tmp_path / "web").mkdir(exist_ok=True)
        (tmp_path / "web" / name).write_bytes(data)
    assert "web, 2 files, 2 documents (1 .md left out)" in open_(path=tmp_path / "web").source


@pytest.mark.parametrize("ending", WAYS)
def test_several_streams_with_padding_are_one_content(write, ending):
    compress = WAYS[ending]
    data = compress(NOISE) + bytes(8) + compress(b"") + compress(b"the end")
    counts = []
    assert content(write("a", data), counts.append) == NOISE + b"the end"
    assert sum(counts) == len(data)


@pytest.mark.parametrize("ending", WAYS)
def test_a_cut_file_is_never_read_short(write, ending):
    whole = WAYS[ending](NOISE) + WAYS[ending](b"the end" * 99)
    for cut in (1, 4, 9, len(WAYS[ending](b"the end" * 99)) - 1, len(whole) // 2, len(whole) - 40):
        with pytest.raises(RequestError, match=r"'.*a' is (cut short|damaged)"):
            content(write("a", whole[:-cut]))


@pytest.mark.parametrize("ending", WAYS)
def test_a_damaged_file_is_refused_by_name(write, ending):
    data = bytearray(WAYS[ending](POEM.encode() * 99))
    if ending == ".zst":
        data = bytearray(zstd.compress(POEM.encode() * 99, options={zstd.CompressionParameter.checksum_flag: 1}))
    data[len(data) // 2] ^= 0x40
    for broken in (bytes(data), WAYS[ending](POEM.encode()) + b"no stream at all"):
        with pytest.raises(RequestError, match=r"a\.txt' is (damaged in its first [\d,]+ bytes|cut short)"):
            content(write("a.txt", broken))


def test_a_long_window_of_zstd_is_read(write):
    data = long_window(NOISE)
    with pytest.raises(zstd.ZstdError, match=r"window|memory|Frame"):
        zstd.decompress(data)
    assert content(write("a.zst", data)) == NOISE


def test_a_missing_package_is_named(write, monkeypatch):
    for name in ("compression", "compression.zstd", "backports", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RequestError) as raised:
        open_(path=write("a.txt.zst", zstd.compress(POEM.encode())))
    assert "is compressed by zstd, and the package that reads it is not installed; pip install 'jaxdist[data]'" in str(
        raised.value
    )


@pytest.mark.parametrize("ending", WAYS)
def test_much_text_in_few_bytes_takes_little_memory(write, ending):
    path = write("a", WAYS[ending](bytes(1 << 25)))
    tracemalloc.start()
    with path.open("rb") as file:
        inside = decompressed(file, path, unseen)
        assert sum(len(piece) for piece in iter(lambda: inside.read(1 << 16), b"")) == 1 << 25
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


@pytest.mark.parametrize("skips", ["refuse", "skip"])
def test_bad_rows_of_a_damaged_file_are_told_as_its_damage(write, skips):
    """A bit in a stored block of gzip goes into the text, and is seen by the checksum at the end alone."""
    content = bytearray(gzip.compress(lines(*(f"text {i} of many" for i in range(40_000))).encode(), compresslevel=0))
    content[content.index(b'{"text": "text 30000 ')] ^= 4
    path = write("a.jsonl.gz", bytes(content))
    for call in (lambda: open_(path=path, on_error=skips), lambda: main([str(path), "--data.on_error", skips])):
        with pytest.raises(RequestError) as refused:
            call()
        (problem,) = refused.value.problems
        assert problem.startswith(f"'{path}' is damaged in its first ")
    right = write("b.jsonl.gz", gzip.compress((lines("a good text") * 300 + "{bad\n").encode()))
    with pytest.raises(RequestError, match=r"line 301 of .* is not JSON"):
        open_(path=right)
