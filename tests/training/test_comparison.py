"""`python -m jaxdist.compare RUN RUN ...`, on run folders whose figures are known."""

import json
import re
import subprocess
import sys

import pytest

from jaxdist import compare
from jaxdist.config import RequestError
from jaxdist.request import load, to_toml
from jaxdist.training.comparison import Point, differing_knobs, read_run


def step_line(step: int, loss: float | None, seconds: float = 0.5, unit: str = "token", per_step: int = 100) -> dict:
    speed = {f"{unit}s": step * per_step, "step_seconds": seconds, f"{unit}s_per_second": per_step / seconds}
    return {"step": step, "loss": loss, **speed}


def make_run(folder, lines, **knobs):
    """A run folder with these lines, and a configuration with these knobs, whose names have __ for a dot."""
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = load(None, {name.replace("__", "."): value for name, value in knobs.items()})
    (folder / "config.toml").write_text(to_toml(config))
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """`a` and `b`, which differ in two knobs, and `images`, whose unit is another."""
    monkeypatch.chdir(tmp_path)
    a = [step_line(10, 5.0), {"step": 10, "validation_loss": 5.5}, step_line(20, 4.0, 1.5)]
    a += [{"step": 20, "validation_loss": 4.5}, step_line(30, 3.0), {"step": 30, "validation_loss": 4.75}]
    make_run(tmp_path / "a", a, train__seed="1")
    make_run(tmp_path / "b", [step_line(10, 6.0), step_line(20, None)], train__seed="2", mesh="2x1x1")
    make_run(tmp_path / "images", [step_line(5, 2.0, unit="image")], train__seed="1")
    return tmp_path


def printed(capsys, *words: str) -> str:
    assert compare.main(list(words)) == 0
    return capsys.readouterr().out


NOT_FINITE = "b has no finite loss after step 10, up to step 20: the loss that is shown is that of step 10"


def test_figures(runs, capsys):
    result = json.loads(printed(capsys, "a", "b", "images", "--json"))
    a, b, images = result["runs"]
    assert a == {
        "run": "a",
        "steps": 30,
        "loss": 3.0,
        "validation_loss": 4.75,
        "best_validation_loss": 4.5,
        "best_step": 20,
        "unit": "token",
        "units": 3000,
        "units_per_second": 200.0,
        "step_hours": (10 * 0.5 + 10 * 1.5 + 10 * 0.5) / 3600,
        "goodput": None,
    }
    assert (b["steps"], b["loss"], b["best_validation_loss"]) == (20, 6.0, None)
    assert (images["unit"], images["units"]) == ("image", 500)
    assert result["knobs"] == {"mesh": ["-1x1x1", "2x1x1", "-1x1x1"], "train.seed": ["1", "2", "1"]}
    assert result["notes"] == [NOT_FINITE]


def test_points_say_what_was_spent(runs):
    run = read_run(runs / "a")
    assert run.training == [Point(10, 1000, 5.0, 5.0), Point(20, 2000, 20.0, 4.0), Point(30, 3000, 25.0, 3.0)]
    assert run.validation[1] == Point(20, 2000, 20.0, 4.5)


def test_table(runs, capsys):
    lines = printed(capsys, "a", "b").splitlines()
    cells = [re.split(" {2,}", line) for line in lines[1:3]]
    assert cells[0] == ["a", "30", "3.0000", "4.7500", "4.5000", "20", "3.0 k tokens", "200 tokens", "0:00:25", "-"]
    assert cells[1] == ["b", "20", "6.0000", "-", "-", "-", "2.0 k tokens", "200 tokens", "0:00:10", "-"]
    assert [line.split() for line in lines[3:]] == [
        [],
        ["knob", "a", "b"],
        ["mesh", "-1x1x1", "2x1x1"],
        ["train.seed", "1", "2"],
        NOT_FINITE.split(),
    ]
    assert printed(capsys, "a", "images").splitlines()[-1].startswith("no knob differs")


def test_what_a_run_lacks_is_one_sentence(runs, capsys):
    (runs / "a" / "config.toml").unlink()
    (runs / "b" / "metrics.jsonl").write_text("no line of a run\n")
    (runs / "other").mkdir()
    (runs / "broken").mkdir()
    (runs / "broken" / "config.toml").write_text("[model]\nlayrs = 3\n")
    (runs / "fit").mkdir()
    (runs / "fit" / "environment.json").write_text('{"made by": "jaxdist.fit"}')
    (runs / "linked").mkdir()
    (runs / "linked" / "metrics.jsonl").symlink_to(runs / "a" / "metrics.jsonl")
    names = ["a", "b", "other", "broken", "fit", "linked"]
    result = json.loads(printed(capsys, *names, "--json"))
    assert [run["run"] for run in result["runs"]] == ["a", "b", "broken", "fit"]
    said = "\n".join(result["notes"])
    for sentence in (
        "'other' is not the folder of a run: it has neither config.toml nor metrics.jsonl",
        "a has no config.toml: its knobs are not compared",
        "b has no line in metrics.jsonl that can be read: it has no losses to compare",
        "model.layrs",
        "fit holds a run of jaxdist.fit, without a config.toml: its knobs are not compared",
        "metrics.jsonl is a symbolic link",
    ):
        assert said.count(sentence) == 1, said
    # Of `b` alone the configuration can be read.
    assert result["knobs"] == {}
    assert all(name in printed(capsys, *names) for name in ("a", "b", "broken", "fit"))


def test_a_run_that_has_diverged_says_so_in_a_table_that_can_be_read(runs, capsys):
    make_run(runs / "wide", [step_line(10, 1e300), step_line(20, -1e300)])
    make_run(runs / "never", [step_line(10, None)])
    lines = printed(capsys, "wide", "never").splitlines()
    assert lines[1].split()[:3] == ["wide", "20", "-1e+300"]
    assert lines[-1] == "no line in metrics.jsonl of never has a finite loss: it has no losses to compare"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "compare needs RUNS, the folders of runs, such as runs/a runs/b"),
        (["a", "a", "b"], "run folder 'a' is named 2 times; name it once"),
        (["a", "a/", "b"], "run folders 'a' and 'a/' are the same one; name it once"),
        (["a", "nowhere"], "run folder 'nowhere' does not exist"),
        (["empty"], "'empty' is not the folder of a run"),
        (["a", "--picture", "losses.jpg"], "would be a PNG file"),
        (["a", "--train.steps", "3"], "train.steps"),
    ],
)
def test_a_wrong_request_is_refused(runs, words, problem):
    (runs / "empty").mkdir()
    with pytest.raises(RequestError) as error:
        compare.main(words)
    (sentence,) = error.value.problems
    assert problem in sentence


def test_knobs_of_a_start_are_not_compared(runs):
    one, other = (read_run(runs / name) for name in ("a", "images"))
    one.config = one.config.with_knobs({"run_dir": runs / "x", "resume": "never", "cluster.processes": 4})
    assert differing_knobs([one, other]) == {}


def test_the_picture_has_each_loss_in_three_panels(runs, capsys, monkeypatch):
    from jaxdist.training import comparison_picture

    drawn = []
    monkeypatch.setattr(comparison_picture, "write_picture", lambda path, figure, dpi: drawn.append((path, figure)))
    assert printed(capsys, "a", "b", "--picture", "both.png").endswith("drawn in both.png\n")
    ((path, figure),) = drawn
    assert path.name == "both.png"
    panels = {axes.get_xlabel(): axes.get_lines() for axes in figure.axes}
    assert list(panels) == ["step", "tokens", "hours of steps"]
    training, validation, other = (
        [list(line.get_xdata()) for line in lines] for lines in zip(*panels.values(), strict=True)
    )
    assert training == [[10, 20, 30], [1000, 2000, 3000], [5 / 3600, 20 / 3600, 25 / 3600]]
    assert validation == training
    assert other == [[10], [1000], [5 / 3600]]
    assert [list(line.get_ydata()) for line in panels["step"]] == [[5.0, 4.0, 3.0], [5.5, 4.5, 4.75], [6.0]]
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["a", "b"]


def test_it_does_not_import_jax(runs):
    code = "import sys\nfrom jaxdist.compare import main\nmain(sys.argv[1:])\nsys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code, "a", "b", "--picture=p.png"], cwd=runs, check=True, capture_output=True)
    assert (runs / "p.png").read_bytes().startswith(b"\x89PNG")
