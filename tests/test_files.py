"""Files that are written whole, and never through a symbolic link."""

import errno
import os
import stat

import pytest

from jaxdist.files import open_no_follow, replacing, write_whole


def test_a_link_is_replaced_and_not_followed(tmp_path):
    outside, name = tmp_path / "outside", tmp_path / "run" / "config.toml"
    name.parent.mkdir()
    outside.write_text("kept")
    name.symlink_to(outside)
    write_whole(name, "new")
    assert (outside.read_text(), name.read_text(), name.is_symlink()) == ("kept", "new", False)


def test_an_error_leaves_what_was_there_and_nothing_else(tmp_path):
    (tmp_path / "a").write_text("old")

    def broken():
        with replacing(tmp_path / "a") as temporary:
            temporary.write_text("half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_text() == "old"


def test_the_umask_decides_who_may_read_it(tmp_path):
    before = os.umask(0o027)
    try:
        write_whole(tmp_path / "a", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_appending_through_a_link_is_refused(tmp_path):
    (tmp_path / "outside").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError) as found:
        open_no_follow(tmp_path / "link", "a")
    assert found.value.errno == errno.ELOOP
    with open_no_follow(tmp_path / "own", "a") as file:
        file.write("ä")
    assert (tmp_path / "own").read_bytes() == "ä".encode()
