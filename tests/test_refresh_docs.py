"""The outputs on pages come from `scripts/refresh_docs.py`, or the page and the script say why they cannot."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "refresh_docs.py"
CHEAP = ["configuration", "meshes", "pipelines", "planning", "processes", "slurm"]
"""How-to guides whose fast blocks are refusals, dry runs and plans: nothing of them trains or compiles."""

RECIPES = sorted((ROOT / "docs" / "contributing").glob("*.md"))


@pytest.fixture(scope="module")
def refresh():
    spec = importlib.util.spec_from_file_location("refresh_docs", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["refresh_docs"] = module
    spec.loader.exec_module(module)
    return module


def test_every_output_has_its_command_or_a_reason(refresh):
    named = set()
    for page in refresh.pages():
        marked = refresh.markers(page)
        outputs = {block.start for block in refresh.blocks(page) if block.language == ""}
        # A block with a language may be an output too, such as a file that a command has written.
        assert outputs <= {marker.block.start for marker in marked if marker.block}, page
        lines = page.read_text().split("\n")
        for marker in (marker for marker in marked if marker.kind == "elsewhere"):
            named.add(marker.text)
            need = refresh.ELSEWHERE[marker.text]
            assert refresh.BY_HAND.format(need=need) in lines[marker.block.end : marker.block.end + 3], (page, need)
    assert named == set(refresh.ELSEWHERE)


def test_an_output_without_a_marker_and_a_marker_without_a_block_are_found(refresh, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```\nan output\n```\n")
    assert [block.language for block in refresh.blocks(page)] == [""]
    assert refresh.markers(page) == []
    page.write_text("<!-- output of: python -m jaxdist -->\n\n```\nan output\n```\n")
    with pytest.raises(refresh.Wrong, match="no block follows"):
        refresh.markers(page)
    page.write_text("<!-- output of: python -m jaxdist\n     exits: 2 -->\n```\nan output\n```\n")
    with pytest.raises(refresh.Wrong, match="'exits: 2' in a comment is not known"):
        refresh.markers(page)


PAGE = """\
```sh
echo one; echo jax 1.2; echo three; echo four
```

<!-- output of the block above
     lines: /one/../jax/ /four/ -->
```
one
jax {version}
...
{last}
```

<!-- run: echo {{"a": 1}} > made.json -->
<!-- output of the commands below
     exit: 0 3 -->
```
$ cat made.json
{shown}
$ echo no; exit 3
no
```
"""


@pytest.mark.parametrize("right", [{}, {"version": "0.9"}])
@pytest.mark.parametrize("wrong", [{}, {"last": "five"}, {"shown": "{a: 2}"}])
def test_a_stale_output_is_found_and_rewritten(refresh, tmp_path, monkeypatch, capsys, right, wrong):
    """A version may differ; what a command says may not."""
    page = tmp_path / "page.md"
    truth = {"version": "1.2", "last": "four", "shown": "{a: 1}"} | right
    page.write_text(PAGE.format(**truth | wrong))
    monkeypatch.setattr(refresh, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["refresh_docs.py", "--check", str(page)])
    assert refresh.main() == len(wrong)
    for changed in wrong.values():
        assert f"-{changed}" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["refresh_docs.py", str(page)])
    assert refresh.main() == 0
    if "last" in wrong:
        truth["version"] = "1.2"  # a block that is rewritten is rewritten whole
    assert page.read_text() == PAGE.format(**truth)


def test_a_command_that_ends_otherwise_fails_the_check(refresh, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("<!-- output of: echo gone; false -->\n```\ngone\n```\n")
    monkeypatch.setattr(sys, "argv", ["refresh_docs.py", "--check", str(page)])
    assert refresh.main() == 1
    assert "ended with 1, not 0" in capsys.readouterr().err


def test_measurements_are_compared_without_their_numbers(refresh):
    marker = refresh.Marker("of", "", silent=False, line=0, measured=True)
    assert refresh.compared(marker, ["step  12.5 ms"]) == refresh.compared(marker, ["step 9,000.25 s"])
    assert refresh.compared(marker, ["step  12.5 ms"]) != refresh.compared(marker, ["loss  12.5 ms"])
    assert refresh.compared(marker, ["...", "step 1 s"]) == refresh.compared(marker, ["step 2 s", "..."])
    marker.measured = False
    assert refresh.compared(marker, ["step  12.5 ms"]) != refresh.compared(marker, ["step  12.6 ms"])


@pytest.mark.parametrize(("kind", "compared"), [("of", 1), ("below", 2)])
def test_of_an_unstable_text_the_first_line_is_compared(refresh, kind, compared):
    """In a transcript, a command stands above it."""
    marker = refresh.Marker(kind, "", silent=False, line=0, unstable=True)
    lines = ["one", "two", "three"]
    for index in range(3):
        changed = [*lines[:index], "other", *lines[index + 1 :]]
        assert (refresh.compared(marker, changed) == refresh.compared(marker, lines)) == (index >= compared)


@pytest.mark.slow
def test_the_guides_show_what_their_commands_print():
    """A cheap set; the whole is run by hand: `python scripts/refresh_docs.py --check`."""
    check_blocks([ROOT / "docs" / "how-to" / f"{name}.md" for name in CHEAP], "--fast")


@pytest.mark.exhaustive
def test_the_tutorial_of_fine_tuning_shows_what_its_commands_print():
    """Its measured losses differ from machine to machine; the answers of the tuned model do not.

    The same way is gone in each run of the tests by `tests/training/test_chats.py`, in a quarter of the time.
    """
    check_blocks([ROOT / "docs" / "tutorials" / "fine-tune.md"])


@pytest.mark.exhaustive
def test_the_recipes_show_what_a_changed_tree_prints():
    """What a user sees of the addition; the outputs of pytest are in the slow blocks."""
    check_blocks(RECIPES, "--fast")


def check_blocks(pages: list[Path], *options: str) -> None:
    command = [sys.executable, str(SCRIPT), "--check", *options, *map(str, pages)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_recipe_runs_in_a_changed_copy_and_other_pages_here(refresh, tmp_path):
    session = refresh.Session(tmp_path)
    seen = {}
    for name in ("contributing/add-a-lecture-claim.md", "how-to/meshes.md"):
        session.begin(ROOT / "docs" / name)
        counted = session.run('grep -c "^pipeline-chunks" "$PYTHONPATH/jaxdist/lab/claims.csv" || true', ROOT)
        seen[name] = (session.tree, counted)
    assert list(seen.values()) == [(tmp_path / "home" / "jaxdist", ["1"]), (ROOT, ["0"])]


def test_a_diff_that_does_not_fit_fails_the_check(refresh, tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text("```diff\n--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-gone\n+there\n```\n")
    monkeypatch.setattr(refresh, "is_recipe", lambda page: True)
    monkeypatch.setattr(sys, "argv", ["refresh_docs.py", "--check", str(page)])
    assert refresh.main() == 1
    assert "these lines are not there (any more):\ngone" in capsys.readouterr().err


def test_a_fence_ends_with_as_many_marks(refresh, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("````diff\n```\n````\n```\nan output\n```\n")
    assert [(block.language, block.lines) for block in refresh.blocks(page)] == [("diff", ["```"]), ("", ["an output"])]
