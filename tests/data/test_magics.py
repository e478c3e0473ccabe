"""Files of formats that are not read: each is refused by its name, whatever it is called."""

import bz2
import gzip
import io
import lzma
import pickle
import sqlite3
import tarfile
import zipfile

import numpy as np
import pytest
import safetensors.numpy

from jaxdist.config import RequestError
from jaxdist.data.naming.magics import foreign
from tests.data.files import POEM, ids, lines, open_

IDS = np.arange(4000, dtype="<u2") % 250


def numpy_file(save, *arrays, **named) -> bytes:
    out = io.BytesIO()
    save(out, *arrays, **named)
    return out.getvalue()


def zipped(name: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, POEM)
    return out.getvalue()


def tarred(form: int) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        member = tarfile.TarInfo("poem.txt")
        member.size = len(POEM.encode())
        archive.addfile(member, io.BytesIO(POEM.encode()))
    return out.getvalue()


def database(folder) -> bytes:
    with sqlite3.connect(folder / "a.db") as connection:
        connection.execute("create table texts (text)")
    connection.close()
    return (folder / "a.db").read_bytes()


def headered(magic: int, version: int, dtype: str) -> bytes:
    """As llm.c writes tokens: 256 int32 of header first."""
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, IDS.size
    return header.tobytes() + IDS.astype(dtype).tobytes()


STREAM = b"\xff\xff\xff\xff\x78\x00\x00\x00\x10\x00\x00\x00\x00\x00\x0a\x00"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"

SAMPLES = {
    "gzip of bzip2": (gzip.compress(bz2.compress(POEM.encode())), "compressed twice, by bzip2 inside; decompress it"),
    "lz4": (b"\x04\x22\x4d\x18\x64\x40\xa7" + bytes(99), "compressed by lz4"),
    "7z": (b"7z\xbc\xaf\x27\x1c\x00\x04" + bytes(99), "archive of 7-Zip; unpack it"),
    "zip": (zipped("poem.txt"), "a zip archive; unpack it"),
    "npz": (numpy_file(np.savez, train=IDS), "numpy arrays (.npz); where all token ids are below 65,536"),
    "npy": (numpy_file(np.save, IDS), "a numpy array (.npy); where all token ids are below 65,536"),
    "torch": (zipped("archive/data.pkl"), "torch.save); export its text"),
    "old torch": (pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + bytes(99), "torch.save); export its text"),
    "encrypted Parquet": (b"PARE\x15\x04\x15\x10\x15\x14L\x15\x02" + bytes(99) + b"PARE", "an encrypted Parquet file"),
    "gzip of Parquet": (gzip.compress(b"PAR1\x15\x04\x15" + bytes(99)), "a Parquet file; decompress it"),
    "gzip of Arrow": (gzip.compress(b"ARROW1\x00\x00\xff\xff\xff\xff" + bytes(99)), "an Arrow file; decompress it"),
    "bzip2 of an Arrow stream": (bz2.compress(STREAM + bytes(99)), "an Arrow stream; decompress it"),
    "Feather": (b"FEA1\x00\x00\x00\x00" + bytes(99), "a Feather file of version 1; write it again"),
    "Git LFS": (POINTER, "a pointer of Git LFS, and the file itself is elsewhere; run git lfs pull in its folder"),
    "UTF-16": (POEM.encode("utf-16"), "text in UTF-16; convert it: iconv -f UTF-16 -t UTF-8"),
    "UTF-16, big-endian": (b"\xfe\xff" + POEM.encode("utf-16-be"), "text in UTF-16; convert it"),
    "HDF5": (b"\x89HDF\r\n\x1a\n\x00\x00" + bytes(99), "an HDF5 file; export its text"),
    "safetensors": (safetensors.numpy.save({"a": IDS}), "a safetensors file"),
    "safetensors with metadata": (safetensors.numpy.save({"a": IDS}, {"b": "c"}), "a safetensors file"),
    "PDF": (b"%PDF-1.7\n%\xb5\xb5\xb5\xb5\n1 0 obj" + bytes(99), "a PDF document; export its text"),
    "questions of llm.c": (headered(20240522, 1, "<u2"), "a file of questions of llm.c (magic 20240522), which no"),
    "Megatron": (b"MMIDIDX\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x08" + bytes(99), "Megatron (.idx), which holds no"),
    "old Megatron": (b"TNTIDX\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00" + bytes(99), "Megatron (.idx)"),
}
SAMPLES |= {
    f"tar {form}": (tarred(form), "a tar archive; unpack it")
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
}
SAMPLES |= {
    f"{name} of a tar archive": (compress(tarred(tarfile.USTAR_FORMAT)), "a tar archive; unpack it")
    for name, compress in [("gzip", gzip.compress), ("xz", lzma.compress)]
}
SAMPLES |= {
    f"pickle {protocol} of {type(value).__name__}": (pickle.dumps(value, protocol), "a pickle of Python objects")
    for protocol in (2, 3, 4, 5)
    for value in (POEM.split(), {"text": POEM}, IDS)
}


@pytest.mark.parametrize(("content", "sentence"), SAMPLES.values(), ids=list(SAMPLES))
@pytest.mark.parametrize("ending", [".txt", ".jsonl", ".bin", ".unknown"])
def test_a_known_format_is_refused_by_name_on_both_sides(write, cache, content, sentence, ending):
    wrong, right = write(f"wrong{ending}", content), write(f"right{ending}", POEM)
    for knobs, knob in (
        ({"path": wrong}, "data.path"),
        ({"path": right, "validation_path": wrong}, "data.validation_path"),
    ):
        with pytest.raises(RequestError) as raised:
            open_(**knobs)
        assert f"{knob} '{wrong}' is " in str(raised.value)
        assert sentence in str(raised.value)
        assert "not utf-8" not in str(raised.value)
    assert not cache.exists()


def test_a_database_is_refused_by_name(write, tmp_path):
    with pytest.raises(RequestError, match="is an SQLite database; export its text"):
        open_(path=write("a.txt", database(tmp_path)))


def test_two_files_of_one_format_are_not_called_two_kinds(write):
    paths = write("a.jsonl", lines("text")), write("b.jsonl.lz4", SAMPLES["lz4"][0])
    with pytest.raises(RequestError) as raised:
        open_(path=paths[0], validation_path=paths[1])
    assert len(raised.value.problems) == 1
    assert "is compressed by lz4" in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "PAR1 is how a Parquet file starts",
        "version https://git-lfs.github.com is no pointer",
        "BZh9 starts bzip2",
        "7z and PK are archives",
        "%PDF-1.7 starts a PDF",
    ]
    + ["ustar ".rjust(263), "MMIDIDX", "ARROW1 and FEA1", "SQLite format 3", '{"text": "x"}', '        {"text"'],
)
def test_a_text_about_a_format_is_a_text(write, text):
    assert foreign(write("a.txt", text + "\n" + POEM)) is None


def test_tokens_are_not_taken_for_a_format(write):
    random = np.random.default_rng(0)
    for start in (b"", b"\x1f\x8b", b"\x80\x02", b"PK", b"BZ"):
        for vocab in (96, 300, 50_304, 65_536):
            content = np.frombuffer(start, "<u2").tolist() + random.integers(0, vocab, 300).tolist()
            assert foreign(write("a.bin", ids(*content))) is None
