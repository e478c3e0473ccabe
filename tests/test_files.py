"""Files that are written whole, and never through a symbolic link."""

import errno
import os
import stat

import pytest
import xxhash

from jaxdist.files import checksum, open_no_follow, replacing, write_whole


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


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError) as found:
        open_no_follow(tmp_path / "pipe", "a")
    assert found.value.errno == errno.ENXIO


def test_a_name_may_be_as_long_as_a_name_can_be(tmp_path):
    path = tmp_path / ("漢" * 85)
    write_whole(path, "x")
    assert path.read_text() == "x"


def test_appending_through_a_link_is_refused(tmp_path):
    (tmp_path / "outside").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError) as found:
        open_no_follow(tmp_path / "link", "a")
    assert found.value.errno == errno.ELOOP
    with open_no_follow(tmp_path / "own", "a") as file:
        file.write("ä")
    assert (tmp_path / "own").read_bytes() == "ä".encode()


@pytest.mark.parametrize("size", [0, 1, 1 << 19, (1 << 19) + 1])
def test_a_checksum_is_that_of_all_bytes(tmp_path, size):
    content = os.urandom(size)
    (tmp_path / "a").write_bytes(content)
    assert checksum(tmp_path / "a") == (size, xxhash.xxh3_64_hexdigest(content))


def test_only_regular_files_have_a_checksum(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    expected = {"link": errno.ELOOP, "folder": errno.EISDIR, "pipe": errno.EINVAL, "nothing": errno.ENOENT}
    for name, number in expected.items():
        with pytest.raises(OSError) as found:
            checksum(tmp_path / name)
        assert found.value.errno == number, name
