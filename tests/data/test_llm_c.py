"""Token files of llm.c are read to the token, and a header that does not agree with the file is a sentence."""

import numpy as np
import pytest

from jaxdist.data.held_out import open_held_out
from tests.data.files import ids, open_

FORMS = {"uint16": (20240520, 1, "<u2"), "uint32": (20240801, 7, "<u4")}


def llm_c(numbers, dtype: str = "uint16", **header: int) -> bytes:
    """A file as `write_datafile` of llm.c's dev/data/data_common.py lays it out."""
    magic, version, width = FORMS[dtype]
    start = np.zeros(256, "<i4")
    start[0] = magic
    start[1] = header.get("version", version)
    start[2] = header.get("count", len(numbers))
    return start.tobytes() + np.asarray(numbers).astype(width).tobytes()


@pytest.mark.parametrize("name", ["fineweb_val_000000.bin", "val.unknown"])
@pytest.mark.parametrize(("dtype", "vocab"), [("uint16", 50_304), ("uint32", 128_256)])
def test_it_is_read_to_the_token(write, name, dtype, vocab):
    numbers = np.random.default_rng(0).integers(0, vocab, 400)
    path = write(name, llm_c(numbers, dtype))
    corpus = open_(vocab=vocab, path=path)
    assert corpus.train.tokens.ids.tolist() == numbers[:380].tolist()
    assert corpus.validation.tokens.ids.tolist() == numbers[380:].tolist()
    assert corpus.train.read(np.array([3]))["tokens"].tolist() == [numbers[48:64].tolist()]
    assert corpus.source == f"{path} (llm.c, {dtype}), 380 tokens and 20 held out"
    assert open_held_out(path, None, vocab).tokens.ids.tolist() == numbers.tolist()


def test_a_separate_file_is_validation(write):
    train, validation = write("train.bin", llm_c(range(100))), write("val.bin", llm_c(range(50)))
    corpus = open_(path=train, validation_path=validation)
    assert [corpus.train.tokens.length, corpus.validation.tokens.length] == [100, 50]
    raw = open_(path=train, validation_path=write("raw.bin", ids(*range(50))))
    assert raw.validation.tokens.read(0, 50).tolist() == corpus.validation.tokens.read(0, 50).tolist()
