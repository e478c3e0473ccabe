"""`jaxdist.data.open` in other libraries: the programs of docs/how-to/other-loaders.md, and what they ask.

Where a library is not installed its programs are left out; what it asks of a sequence is tested all the same.
"""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import jaxdist.data
from jaxdist.config import RequestError
from tests.data.files import VOCAB, S, lines

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "other-loaders.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
LIBRARIES = ("torch", "grain", "datasets")
"""What the programs import beside jaxdist; none comes with it."""


@pytest.fixture
def rows(write):
    path = write("web.jsonl", lines(*[f"text {i} of many, {'word ' * (i % 11)}" for i in range(300)]))
    return jaxdist.data.open(path, sequence=S, vocab=VOCAB)


def needs(program: str) -> list[str]:
    return [library for library in LIBRARIES if re.search(rf"^(import|from) {library}\b", program, re.MULTILINE)]


def test_each_library_has_a_program():
    assert {library for program in PROGRAMS for library in needs(program)} == set(LIBRARIES)


@pytest.mark.parametrize("library", ["", *LIBRARIES])
def test_the_programs_of_the_page_run(library, tmp_path):
    """With torch 2.13, grain 0.2.18 and datasets 5.2 they take 5 to 15 s each."""
    if library:
        pytest.importorskip(library)
    data, *others = PROGRAMS
    wanted = [program for program in others if needs(program) == ([library] if library else [])]
    assert wanted
    for program in (data, *wanted):
        (tmp_path / "program.py").write_text(program)
        done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


class Number:
    """A single integer of another library, such as a tensor without axes: no integer of Python, and not iterable."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.array(self.value, dtype)

    def __iter__(self):
        raise TypeError("iteration over a 0-d tensor")


def test_what_loaders_ask_of_a_sequence(rows):
    """Its length, a row by any integer, several rows at once, and a copy in another process."""
    whole = rows[:]["tokens"]
    for number in (3, np.int64(3), np.uint8(3), np.array(3), Number(3)):
        assert rows[number]["tokens"].tolist() == whole[3].tolist()
    order = np.random.default_rng(0).permutation(len(rows))
    batches = [rows.__getitems__(some) for some in (order[:7].tolist(), order[7:14], iter(order[14:21]))]
    assert [row["tokens"].tolist() for batch in batches for row in batch] == whole[order[:21]].tolist()
    row = rows[0]
    row["tokens"][:] = 0
    assert rows[0]["tokens"].tolist() == whole[0].tolist(), "a row that is changed is a copy"


def test_a_process_that_is_started_anew_reads_its_copy(rows, tmp_path):
    rows[0]
    (tmp_path / "rows").write_bytes(pickle.dumps(rows))
    program = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))[[5, 2]]['labels'].tolist())"
    told = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "rows"], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == str(rows[[5, 2]]["labels"].tolist())


class Saved:
    """As far as a `Dataset` of Hugging Face is looked at."""

    def save_to_disk(self, folder):
        raise AssertionError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Saved(), "of type Saved, and names data on disk; write it by its save_to_disk('folder'), and give the folder"),
        (["a.txt", Path("b.txt")], "of type list, and names data on disk; name several by one text, 'a.txt,b.txt'"),
        (np.arange(9), "of type ndarray, and names data on disk; write it to a file, such as texts as .jsonl, or"),
        ([["a text"]], "of type list, and names data on disk; write it to a file"),
    ],
    ids=["Dataset", "paths", "array", "texts"],
)
def test_objects_are_refused_in_a_sentence(given, said):
    with pytest.raises(RequestError) as refused:
        jaxdist.data.open(given, sequence=S, vocab=VOCAB)
    assert str(refused.value).startswith(f"path is {said}")
