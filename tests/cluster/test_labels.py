"""What processes of a user's script print, behind their names."""

import os
import tempfile
import time

import pytest

from jaxdist.cluster.labels import LONGEST, Labelled


def shown(*chunks: bytes) -> bytes:
    """What is shown of an output that comes in these pieces."""
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as result:
        labelled = Labelled(os.fdopen(ours, "rb"), result.fileno(), "[a 1] ")
        for chunk in chunks:
            os.write(theirs, chunk)
            time.sleep(0.05)  # so that it is read alone
        os.close(theirs)
        labelled.close(10)
        result.seek(0)
        return result.read()


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ([], b""),
        ([b"one\ntwo\n"], b"[a 1] one\n[a 1] two\n"),
        ([b"no end"], b"[a 1] no end\n"),
        ([b"\n"], b"[a 1] \n"),
        ([b"a\r\nb\r\n"], b"[a 1] a\n[a 1] b\n"),
        ([b"a\r", b"\nb", b"c\n"], b"[a 1] a\n[a 1] bc\n"),
        ([b" 1 %\r 2 %\r"], b"[a 1]  1 %\n[a 1]  2 %\n"),
        ([b"[a 1] has it\n"], b"[a 1] has it\n"),
        ([b"\xff\x00\n"], b"[a 1] \xff\x00\n"),
    ],
)
def test_lines(chunks, expected):
    assert shown(*chunks) == expected


def test_a_line_without_an_end_is_shown_in_pieces():
    lines = shown(b"x" * (LONGEST // 2), b"x" * (LONGEST // 2), b"y\n").splitlines()
    assert b"".join(line.removeprefix(b"[a 1] ") for line in lines) == b"x" * LONGEST + b"y"


def test_who_holds_the_output_open_is_not_waited_for():
    ours, theirs = os.pipe()
    labelled = Labelled(os.fdopen(ours, "rb"), 1, "")
    labelled.close(0.1)
    os.close(theirs)
    labelled.close(10)
