"""What a run leaves behind and says, and what other commands make of it."""

import importlib.machinery
import io
import json
import math
import os
import re
import shutil
import socket
import sys
import types

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from jaxdist import evaluate, generate, train
from jaxdist.bench import step
from jaxdist.config import Config, DataLost, LogConfig, RequestError
from jaxdist.data.corpus import open_corpus
from jaxdist.doctor.__main__ import main as doctor
from jaxdist.output.streams import LogFile
from jaxdist.request import load
from jaxdist.request.checks.files import OF_A_RUN
from jaxdist.training import plots
from jaxdist.training.console import Screen
from jaxdist.training.forward.optimizer import schedule
from jaxdist.training.metrics import Log
from jaxdist.training.run_dir import RunFolder
from jaxdist.training.run_facts import wandb_id
from jaxdist.training.summary import folded
from jaxdist.training.task import Task
from tests import forks
from tests.training.conftest import SMALL, over
from tests.training.curves import SPEEDS, TIMES, lines

pytestmark = pytest.mark.smoke

KEYS = {
    "step", "time", "loss", "grad_norm", "learning_rate", "tokens", "step_seconds", "data_seconds", "tokens_per_second",
    "mfu", "memory_bytes", "skipped", "goodput",
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text):
    """One finished run, for the tests that only look."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    argv = over(SMALL, f"--data.path={text}", f"--run-dir={folder}", "--mesh=2x1x1", "--log.tensorboard=true")
    assert train.main(argv) == 0
    return folder


def test_all_files_are_there_and_readable(finished):
    config = load(str(finished / "config.toml"), {})
    assert (config.model.layers, config.precision, config.mesh) == (2, "float32", "2x1x1")
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["packages"]["jax"]
    assert len(environment["devices"]) == 2
    assert set(environment) >= {"XLA_FLAGS", "git_revision", "python", "jaxdist"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", environment["start"])
    told = [environment[name] for name in ("host", "job", "processes")]
    assert told == [socket.gethostname(), os.environ.get("SLURM_JOB_ID"), 1]
    assert (environment["compiler_options"], environment["memory_fraction"]) == ({}, None)  # of a CPU
    tokenizer = RunFolder(finished).load_tokenizer()
    assert tokenizer.decode(tokenizer.encode("mesh").ids) == "mesh"
    assert (finished / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((finished / "tensorboard").iterdir())
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == ["10", "15", "20", "best", "sums"]


def test_what_it_writes_is_known_to_those_who_must_not_replace_it(finished):
    assert {path.name for path in finished.iterdir()} <= OF_A_RUN


def test_its_heartbeat_says_that_it_is_done(finished, capsys):
    assert doctor([str(finished), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["processes"]
    assert (row["state"], row["step"], row["pid"]) == ("done", 20, os.getpid())
    assert 0 <= row["data_seconds"] < row["step_seconds"]


def test_metrics_have_the_promised_keys(finished):
    steps = [line for line in lines(finished) if "loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 21))
    assert all(set(line) == KEYS for line in steps)
    assert TIMES - SPEEDS < KEYS
    assert steps[-1]["tokens"] == 20 * 8 * 16
    assert steps[-1]["mfu"] is None
    assert steps[-1]["memory_bytes"] is None
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.2
    last = [line for line in lines(finished) if "validation_loss" in line][-1]
    assert (last["step"], last["validation_batches"]) == (20, 2)
    assert last["validation_tokens"] == 2 * 8 * 16


def test_the_resolved_config_is_usable_as_config(finished, tmp_path):
    again = tmp_path / "again"
    assert train.main([str(finished / "config.toml"), f"--run-dir={again}"]) == 0
    assert [line["loss"] for line in lines(again) if "loss" in line] == [
        line["loss"] for line in lines(finished) if "loss" in line
    ]


@pytest.mark.parametrize("mesh", ["1x1x1", "data=2,replica=2"])
def test_evaluate_on_any_mesh(finished, capsys, mesh):
    assert evaluate.main([str(finished), f"--mesh={mesh}"]) == 0
    said = capsys.readouterr().out
    whole = float(
        re.search(
            r"validation loss ([\d.]+) nats per token over [\d.]+(?: k)? tokens in windows of \d+  \(unigram", said
        )[1]
    )
    of_two_batches = [line["validation_loss"] for line in lines(finished) if "validation_loss" in line][-1]
    assert whole == pytest.approx(of_two_batches, rel=0.2)
    assert 2 < whole < 6


def test_evaluate_agrees_across_meshes(finished, capsys):
    found = []
    for options in (["--mesh=1x1x1"], ["--mesh=4x1x1"], ["--mesh=2x2x1", "--parallel.zero=3"]):
        evaluate.main([str(finished), *options])
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("options", [["--temperature=0"], ["--top-k=3", "--seed=5", "--samples=2"]])
def test_generate_writes_the_same_on_any_mesh(finished, capsys, options):
    texts = []
    for mesh in ("1x1x1", "2x1x1"):
        argv = [str(finished), f"--mesh={mesh}", "--prompt=mesh axis", "--tokens=24", *options]
        assert generate.main(argv) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0].startswith("mesh axis" if len(options) == 1 else "--- 1\nmesh axis")
    assert len(texts[0]) > len("mesh axis") + 30


def test_generate_needs_no_batch_that_divides(finished, capsys):
    assert generate.main([str(finished), "--mesh=3x1x1", "--tokens=4"]) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (["--tokens=0", "--samples=0", "--temperature=-1"], ["tokens", "samples", "temperature"]),
        (["--top-k=-2", "--seed=x"], ["top-k", "seed"]),
        (["--prompt="], ["prompt"]),
        (["--checkpoint=7"], ["holds no step 7; it has 10, 15, 20"]),
        (["--train.steps=3"], ["train.steps"]),
    ],
)
def test_generate_refuses(finished, options, fragments):
    with pytest.raises(RequestError) as error:
        generate.main([str(finished), "--mesh=1x1x1", *options])
    for fragment in fragments:
        assert fragment in str(error.value)


def test_the_metrics_are_the_steps_own(finished):
    """The learning rate that each step used, and how the figures hang together."""
    rate = schedule(load(str(finished / "config.toml"), {}).optimizer, 20)
    for line in lines(finished):
        if "loss" in line:
            assert line["learning_rate"] == pytest.approx(float(rate(line["step"] - 1)), rel=1e-6)
            assert line["tokens_per_second"] == pytest.approx(8 * 16 / line["step_seconds"])
            assert 0 <= line["data_seconds"] <= line["step_seconds"]


def test_evaluate_on_other_data_uses_the_runs_tokenizer(finished, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("a sentence about nothing in particular; " * 400)
    assert evaluate.main([str(finished), f"--data.path={other}"]) == 0
    said = capsys.readouterr()
    assert "not the data that the run was trained on" in said.err
    evaluate.main([str(finished), f"--data.path={other}", f"--data.tokenizer={finished / 'tokenizer.json'}"])
    assert capsys.readouterr().out == said.out


@pytest.mark.slow
def test_validation_does_not_depend_on_accumulation(run):
    found = [lines(run(f"k{k}", f"--train.accumulation={k}", "--train.steps=4")) for k in (1, 4)]
    values = [[line["validation_loss"] for line in one if "validation_loss" in line] for one in found]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_the_prompt_is_encoded_as_the_training_text_was(finished, tmp_path, capsys):
    folder = tmp_path / "special"
    shutil.copytree(finished, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    special = [("<|endoftext|>", end)]
    tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A <|endoftext|>", special_tokens=special)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = []
    for one in (finished, folder):
        assert generate.main([str(one), "--prompt=mesh axis device", "--temperature=0", "--tokens=8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(RequestError, match="is not a tokenizer"):
        generate.main([str(folder)])


def test_loss_that_is_not_finite_stops_the_run_after_n(run, tmp_path, capsys):
    run("nan", "--optimizer.learning-rate=1e30", "--optimizer.clip=0", "--train.max-skipped=3", code=1)
    said = capsys.readouterr().err
    assert "stopped: 3 steps in a row up to step" in said
    assert "; there is no checkpoint\n" in said
    assert "update skipped (1 in a row, 1 in all)" in said
    assert lines(tmp_path / "nan")[-1]["skipped"] == 3


def test_predicted_and_measured_memory_are_told(run, monkeypatch, capsys):
    """As on a GPU, which knows its peak; and on a device that is about to be too small, what to change."""
    monkeypatch.setattr("jaxdist.training.meter.peak_bytes", lambda device: 3 * 2**20)
    monkeypatch.setattr("jaxdist.cluster.runtime.capacity", lambda device: 2**17)
    run("told", "--mesh=2x1x1")
    said = capsys.readouterr().err
    (warning,) = re.findall(r"warning +(.*)", said)
    assert re.search(
        r"predicted may not fit into 64 KiB; (set .*\(\d+ KiB predicted\)|no other setting is predicted)", warning
    )
    assert len(re.findall(r"3 MiB at most on a device until now, after the first step; \d+ KiB predicted", said)) == 1


def test_not_a_terminal_gets_plain_lines(run, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as many CI systems do
    folder = run("plain")
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\r" not in said
    assert "step 20/20  loss" in said
    words = [
        "versions",
        "devices",
        "mesh",
        "model",
        "batch",
        "arithmetic",
        "memory",
        "attention",
        "data",
        "compiled",
        "done",
        "losses",
        "next",
    ]
    for word in [*words, "run folder"]:
        assert f"\n{word} " in "\n" + said
    picture, commands = said.splitlines()[-2:]
    assert picture == f"losses      {folder}/loss.png"
    assert (folder / "loss.png").is_file()
    assert (
        commands
        == f"next        python -m jaxdist.generate {folder} --prompt TEXT; python -m jaxdist.evaluate {folder}"
    )


def test_a_terminal_gets_a_bar(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen, config = Terminal(), Config(log={"tensorboard": False})
    with Log(config.log, RunFolder(tmp_path), 4, 0, Screen(screen)) as log:
        for step in range(1, 5):
            values = dict.fromkeys(KEYS, 1.0) | {"step": step, "mfu": 0.41, "loss": 2.5, "tokens_per_second": 12345.0}
            log.progress(step, values)
            log.metrics(values)
    assert "loss 2.5000  12,345 tokens/s  MFU 41.0%" in screen.getvalue()
    assert "4/4" in screen.getvalue()


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path):
    config = Config(log={"tensorboard": False})
    with Log(config.log, RunFolder(tmp_path), 1, 0, Screen(io.StringIO())) as log:
        log.metrics({"step": 1, "validation_loss": float("nan")})
    (line,) = lines(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line.pop("time"))
    assert line == {"step": 1, "validation_loss": None}


@pytest.mark.slow
def test_wandb_that_fails_never_stops_a_run(run, monkeypatch, capsys):
    def fail(**_):
        raise ConnectionError("no network")

    library = types.ModuleType("wandb")
    library.__spec__ = importlib.machinery.ModuleSpec("wandb", None, origin="here")
    library.Settings, library.init = dict, fail
    monkeypatch.setitem(sys.modules, "wandb", library)
    run("tracked", "--log.wandb=project")
    assert "wandb could not start and is switched off for this run: no network" in capsys.readouterr().err


@pytest.mark.slow
def test_wandb_itself_has_one_run_for_one_that_goes_on_and_nothing_to_warn_of(run, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb", reason="needs the extra 'wandb'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    constant = ("--log.wandb=project", "--optimizer.schedule=constant", "--validation.every=0")
    try:
        folder = run("tracked", "--train.steps=4", *constant)
        first = json.loads((folder / "run.json").read_text())
        run("tracked", "--train.steps=6", *constant)
    finally:
        wandb.teardown()
    assert json.loads((folder / "run.json").read_text()) == first | {"saved": 6}
    assert first["wandb"] != first["id"]
    assert {path.name for path in (folder / "wandb").rglob("*.wandb")} == {f"run-{first['wandb']}.wandb"}
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[1]", '{"id": "own", "wandb": 7}', '{"id": "own", "wandb": "../../x"}'])
def test_an_id_of_wandb_that_is_none_is_made_anew_and_the_runs_own_stays(tmp_path, content):
    folder = RunFolder(tmp_path)
    folder.run.write_text(content)
    own, made = folder.identity(), wandb_id(folder.path)
    assert re.fullmatch("[0-9a-f]{16}", made)
    assert (folder.identity(), wandb_id(folder.path)) == (own, made)


def test_epochs_count_rows(request_of, tmp_path):
    argv = [option for option in request_of("epochs", "--train.epochs=0.5") if "train.steps" not in option]
    assert train.main(argv) == 0
    rows = open_corpus(load(str(tmp_path / "epochs" / "config.toml"), {}).data, 300, 16).train.count
    assert lines(tmp_path / "epochs")[-1]["step"] == math.ceil(rows / 2 / 8)


@pytest.mark.exhaustive
def test_lion_and_sgd_train_too(run):
    for name, rate in (("lion", "1e-3"), ("sgd", "0.3")):
        found = lines(run(name, f"--optimizer.name={name}", f"--optimizer.learning-rate={rate}"))
        losses = [line["loss"] for line in found if "loss" in line]
        assert losses[-1] < losses[0]


@pytest.mark.slow
def test_bfloat16_trains(run):
    losses = [line["loss"] for line in lines(run("bf16", "--precision=bfloat16")) if "loss" in line]
    assert losses[-1] < losses[0] - 0.2


@pytest.mark.slow
def test_bench_prints_one_json_object_and_nothing_else(tmp_path):
    options = ["--model.layers=1", "--model.embed=16", "--model.heads=2", "--model.sequence=16", "--repeats=3"]
    command = [sys.executable, "-m", "jaxdist.bench", "step", "--mesh=2x1x1", "--json", *options]
    done = forks.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    low, high = result["step_seconds_quartiles"]
    assert 0 < low <= result["step_seconds"] <= high
    assert result["tokens_per_second"] == pytest.approx(16 * 16 / result["step_seconds"])
    assert result["mfu"] is None
    assert result["peak_flops"] is None
    assert result["devices"] == 2
    assert not list(tmp_path.iterdir())


def test_the_picture_shows_both_losses(finished, tmp_path):
    plots.plot_loss(
        finished / "metrics.jsonl", tmp_path / "loss.png", {"nats": 5.0, "name": "unigram entropy", "unit": "token"}
    )
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_a_picture_of_one_step_shows_a_point(tmp_path, monkeypatch):
    """A line of one point is not drawn, and half steps do not exist."""
    drawn = []
    monkeypatch.setattr(plots, "write_picture", lambda path, figure, dpi: drawn.append(figure))
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 2, "loss": 3.2}\n')
    plots.plot_loss(metrics, tmp_path / "loss.png", {"nats": 5.0, "name": "unigram entropy", "unit": "token"})
    (axes,) = drawn[0].axes
    assert axes.lines[0].get_marker() == "o"
    assert all(tick == round(tick) for tick in axes.get_xticks())
    metrics.write_text("".join(f'{{"step": {step}, "loss": 3.2}}\n' for step in range(1, 200)))
    plots.plot_loss(metrics, tmp_path / "loss.png", {"nats": 5.0, "name": "unigram entropy", "unit": "token"})
    assert drawn[1].axes[0].lines[0].get_marker() == "None"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("step_seconds", 0.19225917550011218, "0.192 s"),
        ("step_seconds_quartiles", [0.0123, 0.25], "12.3 ms to 0.25 s"),
        ("tokens_per_second", 10652.287437895546, "10,652"),
        ("temporary_bytes", 3 * 2**20, "3 MiB"),
        ("peak_flops", 989e12, "989 TFLOP/s"),
        ("mfu", None, "not known"),
        ("mfu", 0.4321, "43.2%"),
        ("mesh", "data=2", "data=2"),
    ],
)
def test_what_bench_step_tells_has_units(name, value, told):
    assert step.for_people(name, value) == told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_summary_is_broken_between_words_at_the_width_of_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = [
        "memory      " + "parameters 4 MiB, " * 8,
        "layout      table  300x16    vocab embed  " + "model data  " * 6,
    ]
    found = folded(lines, Terminal())
    assert max(map(len, found[:-1])) <= 80
    assert all(line.startswith(" " * 12 + "parameters") or line.startswith(" " * 12) for line in found[1:-1])
    assert " ".join(" ".join(found[:-1]).split()) == " ".join(lines[0].split())
    assert found[-1] == lines[1]  # a table
    assert folded(lines, io.StringIO()) == lines


def test_data_that_is_wrong_leaves_no_folder_behind(request_of, tmp_path):
    (tmp_path / "tokens.bin").write_bytes(b"\xff\xff" * 5000)
    with pytest.raises(RequestError, match="holds token id 65535"):
        train.main(request_of("never", f"--data.path={tmp_path / 'tokens.bin'}"))
    assert not (tmp_path / "never").exists()


def test_the_log_is_in_the_folder_too_and_has_the_time_of_each_line(finished):
    log = (finished / "log.txt").read_text().splitlines()
    said = [re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ  (.*)", line)[1] for line in log]
    for beginning in ("versions", "run folder", "compiled", "step 1/20  loss", "step 20  validation loss", "done"):
        assert any(line.startswith(beginning) for line in said), beginning
    assert re.search(r"  0:\d\d:\d\d left$", next(line for line in said if line.startswith("step 10/20")))


def test_a_terminal_has_a_bar_and_the_log_has_the_lines(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    log = LogFile()
    log.open(tmp_path / "log.txt", rotates=True)
    with Log(LogConfig(tensorboard=False), RunFolder(tmp_path), 4, 0, Screen(Terminal(), log)) as sinks:
        values = dict.fromkeys(KEYS, 1.0) | {"step": 2, "mfu": None, "loss": 2.5}
        sinks.progress(2, values)
        sinks.metrics(values)
        sinks.say("a note")
    log.close()
    text = (tmp_path / "log.txt").read_text()
    assert "  step 2/4  loss 2.5000  " in text
    assert "  a note\n" in text
    assert "\x1b" not in text


def test_data_that_are_cut_while_a_run_reads_them_end_it_with_a_sentence(run, tmp_path, monkeypatch):
    """One process is not alone in its folder of data. It is a failure: exit code 1, and no traceback."""
    path = tmp_path / "tokens.bin"
    (np.arange(20_000) % 300).astype("<u2").tofile(path)
    batch_after = Task.batch_after

    def cutting(self, step):
        if step == 3:
            os.truncate(path, 1000)
        return batch_after(self, step)

    monkeypatch.setattr(Task, "batch_after", cutting)
    with pytest.raises(DataLost, match=r"tokens.bin' was truncated while it was read: it has 1000 bytes") as error:
        run("cut", f"--data.path={path}", "--validation.every=0")
    assert error.value.exit_code == 1
    assert "was truncated while it was read" in (tmp_path / "cut" / "log.txt").read_text()
