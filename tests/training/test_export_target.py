"""Where an export goes: what it replaces, what it leaves alone, and what is left of one that ends early."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxdist.config import Busy, Failed, RequestError
from jaxdist.process.stop_signals import SIGNALS, raising
from jaxdist.training import export_target
from jaxdist.training.export_marks import FORMAT, MARKER
from jaxdist.training.export_target import exporting
from jaxdist.weights.named_bases import check_not_needed

pytestmark = pytest.mark.smoke

WEIGHTS = "model.safetensors"


def put_folder(path: Path, text: str = "weights") -> None:
    path.mkdir()
    (path / WEIGHTS).write_text(text)
    (path / "config.json").write_text("{}")


def put_file(path: Path, text: str = "weights") -> None:
    save_file({"a": np.frombuffer(text.encode(), np.uint8)}, path, {"format": FORMAT})


KINDS = {"folder": put_folder, "file": put_file}


def export(target: Path, put=put_folder, text: str = "weights", replace: bool = False, meanwhile=lambda: None) -> None:
    with exporting(target, replace) as new:
        put(new, text)
        meanwhile()


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder; None for what is not a file. A link is not followed."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() and not path.is_symlink() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("put", KINDS.values(), ids=KINDS)
def test_an_earlier_export_is_replaced_whole_and_only_when_told_to(tmp_path, put):
    target = tmp_path / "out"
    export(target, put)
    first = contents(tmp_path)
    with pytest.raises(RequestError, match=f"^--export '{target}' is an earlier export; name another, or add --force"):
        export(target, put, "others")
    assert contents(tmp_path) == first
    export(target, put, "others", replace=True)
    export(tmp_path / "same", put, "others")
    weights = lambda path: (path / WEIGHTS if put is put_folder else path).read_bytes()
    assert weights(target) == weights(tmp_path / "same")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "same"}


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    export(tmp_path / "out")
    assert (tmp_path / "out" / WEIGHTS).read_text() == "weights"


def unmark(folder: Path) -> None:
    (folder / MARKER).unlink()


def mark_falsely(folder: Path) -> None:
    (folder / MARKER).write_text(json.dumps({"files": {"../mine": [4, 0.0]}}))


def add(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")


def change(folder: Path) -> None:
    (folder / WEIGHTS).write_text("my weights")


def change_alike(folder: Path) -> None:
    (folder / WEIGHTS).write_text("WEIGHTS")
    os.utime(folder / WEIGHTS, (0, 0))


def as_folder(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()
    (folder / WEIGHTS / "mine").write_text("mine")


def as_link(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder.parent / "elsewhere")
    (folder / WEIGHTS).symlink_to(folder.parent / "elsewhere")


def below(folder: Path) -> None:
    (folder / "runs").mkdir()


CHANGES = {
    unmark: f"has no {MARKER}, by which an export knows its own folder again",
    mark_falsely: f"has no {MARKER}, by which",
    add: "holds other things (notes.txt)",
    change: f"holds a {WEIGHTS} that has changed since its export",
    change_alike: f"holds a {WEIGHTS} that has changed since its export",
    as_folder: f"holds a {WEIGHTS} that is not a file",
    as_link: f"holds a {WEIGHTS} that is not a file",
    below: "holds other things (runs)",
}


@pytest.mark.parametrize("changed", CHANGES, ids=lambda changed: changed.__name__)
def test_what_others_have_written_is_never_replaced(tmp_path, changed):
    """Neither before the export begins, nor where it comes to be while that runs."""
    target = tmp_path / "out"
    export(target)
    with pytest.raises(Failed, match="was made or changed by another program"):
        export(target, replace=True, meanwhile=lambda: changed(target))
    after = contents(tmp_path)
    with pytest.raises(RequestError) as error:
        export(target, replace=True)
    assert str(error.value).startswith(f"--export '{target}' {CHANGES[changed]}")
    assert contents(tmp_path) == after
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("content", [b"", b"mine", (8).to_bytes(8, "little") + b"{}      "])
def test_a_file_of_others_is_never_replaced(tmp_path, content):
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(RequestError, match=r"is not a file that an export of jaxdist wrote, and is not replaced"):
        export(tmp_path / "out", put_file, replace=True)
    assert contents(tmp_path) == {"out": content}


def put_text(path: Path) -> None:
    path.write_text("mine")


def put_marked(path: Path) -> None:
    """As another export would, by hand: `exporting` refuses a second one."""
    export(path.with_name("other"), text="mine")
    path.with_name("other").rename(path)


ARRIVALS = (put_text, put_folder, put_file, put_marked, Path.mkdir)


@pytest.mark.parametrize("put", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("arrival", ARRIVALS, ids=lambda arrival: arrival.__name__)
def test_what_comes_to_the_name_meanwhile_stays(tmp_path, arrival, put):
    target = tmp_path / "out"
    after = {}

    def arrive() -> None:
        arrival(target)
        after.update(contents(tmp_path))

    with pytest.raises(Failed, match=f"^'{target}' was made or changed by another program while the export ran, and"):
        export(target, put, meanwhile=arrive)
    assert contents(tmp_path) == {name: content for name, content in after.items() if not name.startswith(".")}


def test_what_comes_into_an_empty_folder_or_takes_the_place_of_an_export_stays(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    with pytest.raises(Failed, match="by another program"):
        export(target, replace=True, meanwhile=lambda: put_text(target / "notes.txt"))
    assert contents(target) == {"notes.txt": b"mine"}
    shutil.rmtree(target)
    export(target)

    def replace() -> None:
        shutil.rmtree(target)
        put_marked(target)

    with pytest.raises(Failed, match="by another program"):
        export(target, replace=True, meanwhile=replace)
    assert (target / WEIGHTS).read_text() == "mine"


@pytest.mark.parametrize("put", KINDS.values(), ids=KINDS)
def test_a_rename_that_fails_leaves_what_was_there(tmp_path, put, monkeypatch):
    target = tmp_path / "out"
    export(target, put)
    before = contents(tmp_path)
    place = export_target._place

    def full(path: Path, to: Path) -> None:
        if path.name == "content":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        place(path, to)

    monkeypatch.setattr(export_target, "_place", full)
    with pytest.raises(
        Failed, match=f"the export to '{target}' failed: no space left on device; nothing of it is left"
    ):
        export(target, put, "others", replace=True)
    assert contents(tmp_path) == before


def test_a_file_system_without_hard_links_will_do(tmp_path, monkeypatch):
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", link)
    export(tmp_path / "out", put_file)
    with pytest.raises(Failed, match="by another program"):
        export(tmp_path / "b", put_file, meanwhile=lambda: put_text(tmp_path / "b"))
    assert (tmp_path / "b").read_text() == "mine"


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("put", KINDS.values(), ids=KINDS)
def test_a_signal_leaves_nothing(tmp_path, number, put):
    kill = lambda: os.kill(os.getpid(), number)
    old = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt) as error, raising():
            export(tmp_path / "out", put, meanwhile=kill)
        assert str(error.value) == number.name
        assert list(tmp_path.iterdir()) == []
        signal.signal(number, signal.SIG_IGN)
        with raising():
            export(tmp_path / "out", put, meanwhile=kill)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    finally:
        signal.signal(number, old)


def test_a_signal_that_comes_as_an_export_ends_changes_nothing(tmp_path, monkeypatch):
    publish = export_target._publish

    def in_a_hurry(*arguments) -> None:
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        publish(*arguments)

    monkeypatch.setattr(export_target, "_publish", in_a_hurry)
    with raising():
        export(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def killed(target: Path, body: str, before: str = "") -> None:
    """Export to `target` in a process that `body` kills."""
    program = f"""
import os, signal
from pathlib import Path
from jaxdist.process.stop_signals import SIGNALS, raising
from jaxdist.training import export_target
from tests.training.test_export_target import put_folder

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
{textwrap.dedent(before)}
with export_target.exporting(Path({str(target)!r}), replace=True) as new:
    put_folder(new, "others")
    {body}
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == -signal.SIGKILL


def test_the_next_export_of_the_name_removes_what_a_kill_left_and_no_other(tmp_path):
    target = tmp_path / "out"
    for name in ("out", "outer"):
        killed(tmp_path / name, "die()")
    assert len(list(tmp_path.glob(".out.*.tmp/content"))) == 1
    strange = [tmp_path / ".out.0123456789abcdef.tmp", tmp_path / ".out.fedcba9876543210.tmp"]
    strange[0].mkdir()
    strange[1].write_text("mine")
    export(target)
    assert {path.name.partition(".tmp")[0].rpartition(".")[0] for path in tmp_path.glob(".outer*")} == {".outer"}
    assert sorted(tmp_path.glob(".out.*")) == strange
    with exporting(tmp_path / "b", replace=False) as new:
        put_folder(new)
        with pytest.raises(Busy, match=f"--export '{tmp_path}/b' is being written by another process; wait for it"):
            export(tmp_path / "b")
    assert (tmp_path / "b" / WEIGHTS).read_text() == "weights"


@pytest.mark.parametrize(("dies_at", "left"), [("_place", "weights"), ("export_marks.remove", "others")])
def test_a_kill_between_two_renames_loses_nothing(tmp_path, dies_at, left):
    target = tmp_path / "out"
    export(target)
    killed(target, "pass", f"export_target.{dies_at} = die")
    assert target.exists() == (left == "others")
    with pytest.raises(RequestError, match="is an earlier export"):
        export(target)
    assert (target / WEIGHTS).read_text() == left
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def names_in_config(run: Path, base: Path) -> None:
    (run / "config.toml").write_text(f"init_from = '{base}'\n")


def names_relatively(run: Path, base: Path) -> None:
    names_in_config(run, Path(os.path.relpath(base)))


def names_in_source(run: Path, base: Path) -> None:
    (run / "huggingface").mkdir()
    (run / "huggingface" / "source.json").write_text(json.dumps({"path": str(base)}))


def names_in_facts(run: Path, base: Path) -> None:
    (run / "checkpoints" / "best" / "5" / "facts").mkdir(parents=True)
    fact = {"base": {"path": str(base), "digest": "0"}}
    (run / "checkpoints" / "best" / "5" / "facts" / "metadata").write_text(json.dumps(fact))


@pytest.mark.parametrize(
    "names", [names_in_config, names_relatively, names_in_source, names_in_facts], ids=lambda names: names.__name__
)
def test_no_base_that_a_run_names_is_replaced(tmp_path, names):
    """Not by another name of it either; nor where its files are links into the target."""
    (base, run, other) = (tmp_path / name for name in ("base", "runs/a", "runs/b"))
    export(base)
    for folder in (run, other):
        folder.mkdir(parents=True)
        (folder / "config.toml").touch()
    check_not_needed(run, base)
    names(other, base)
    (tmp_path / "link").symlink_to(tmp_path)
    for target in (base, tmp_path / "link" / "base", base / "index.json"):
        for of in (other, run):
            with pytest.raises(RequestError) as error:
                check_not_needed(of, target)
            assert str(error.value) == (
                f"--export '{target}' would change '{base}', which the run '{other}' names as the weights that it "
                f"began with; name another"
            )
    for target in (base.with_name("new"), base / "new" / "out"):
        check_not_needed(run, target)
    (tmp_path / "blobs").mkdir()
    (base / WEIGHTS).rename(tmp_path / "blobs" / "0123")
    (base / WEIGHTS).symlink_to("../blobs/0123")
    with pytest.raises(RequestError, match="would change"):
        check_not_needed(run, tmp_path / "blobs")


def test_no_folder_that_holds_the_run_is_replaced(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    for target in (tmp_path / "runs" / "a", tmp_path / "runs", tmp_path):
        with pytest.raises(RequestError, match=f"--export '{target}' holds the run '{tmp_path}/runs/a' itself"):
            check_not_needed(tmp_path / "runs" / "a", target)


def test_facts_that_are_damaged_name_nothing(tmp_path):
    for base in ("", 5, None, {}, "a\0b", "x" * 5000, ["a"]):
        (tmp_path / "config.toml").write_text(f"init_from = {json.dumps(base) if base is not None else 0}\n")
        shutil.rmtree(tmp_path / "huggingface", ignore_errors=True)
        (tmp_path / "huggingface").mkdir()
        (tmp_path / "huggingface" / "source.json").write_text(json.dumps({"path": base}))
        check_not_needed(tmp_path, tmp_path.parent / "out")
