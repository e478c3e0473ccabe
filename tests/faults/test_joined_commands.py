"""Commands beside `train` that several processes run as one job: the result of one process, told by the first alone."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from jaxdist import evaluate, generate, train
from jaxdist.bench import scaling_text
from jaxdist.output.streams import printable
from tests.data.chats.made import tokenizer_folder
from tests.faults import jobs
from tests.faults.jobs import argv, ends, job, meeting, told
from tests.training.curves import close, lines

APART = "os.environ['JAXDIST_CACHE'] += f'-{me}'"
"""Gives each process a cache of its own."""

SLOW = """
whole = Trainer.step
def slow(self, *rest):
    time.sleep(0.5)
    return whole(self, *rest)
Trainer.step = slow
"""

STEP = [
    "--model.layers=1", "--model.embed=16", "--model.heads=2", "--model.vocab=300", "--model.sequence=16",
    "--warmup=1", "--repeats=2", "--json",
]  # fmt: skip


def said(module: str, words: list[str], errors: Path, processes: int = 2) -> list[str]:
    """What each process of a job that succeeds writes to standard output; the rest is in `errors`."""
    apart = ["sh", "-c", f'exec "$0" "$@" 2>>{errors}', sys.executable, "-m", module, *words]
    with job(meeting(apart, processes)) as running:
        assert ends(running, 240) == [0] * processes, told(running) + errors.read_text()
        return [process.said() for process in running]


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory, caches):
    """The folder of a run of one process."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert train.main(argv(folder, text, "--mesh=1x1x1", "--train.steps=5")) == 0
    return folder


@pytest.mark.exhaustive
def test_evaluate_in_two_processes_is_evaluate_in_one(trained, tmp_path, monkeypatch, capfd):
    """On data that has not been tokenized yet."""
    words = [str(trained), "--mesh=4x1x1", "--parallel.zero=3"]
    capfd.readouterr()
    assert evaluate.main(words) == 0
    alone = capfd.readouterr().out
    assert "step 5  validation loss" in alone
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    assert said("jaxdist.evaluate", words, tmp_path / "errors") == [alone, ""]
    assert (tmp_path / "errors").read_text() == ""


@pytest.mark.parametrize(
    "what", [pytest.param("files", marks=pytest.mark.exhaustive), pytest.param("questions", marks=pytest.mark.slow)]
)
def test_files_and_questions_are_judged_alike_in_two_processes(trained, what, tmp_path, monkeypatch, capfd):
    (tmp_path / "a.txt").write_text("mesh axis shard\n" * 30)
    (tmp_path / "b.txt").write_text("layer token\n")
    row = {"context": "mesh", "choices": [" axis", " shard", " b"], "label": 1}
    (tmp_path / "q.jsonl").write_text((json.dumps(row) + "\n") * 5)
    options = {
        "files": [f"--data.validation-path={tmp_path / 'a.txt'},{tmp_path / 'b.txt'}"],
        "questions": [f"--choices={tmp_path / 'q.jsonl'}"],
    }
    words = [str(trained), "--mesh=2x1x1", "--json", *options[what]]
    capfd.readouterr()
    assert evaluate.main(words) == 0
    alone = json.loads(capfd.readouterr().out)
    monkeypatch.setenv("JAXDIST_CACHE", str(tmp_path / "cache"))
    first, second = said("jaxdist.evaluate", words, tmp_path / "errors")
    assert (json.loads(first), second) == (alone, "")


@pytest.mark.slow
def test_other_options_in_one_process_are_refused():
    commands = meeting([sys.executable, "-m", "jaxdist.bench", "step"], 2)
    commands[1].append("--repeats=7")
    with job(commands) as running:
        assert ends(running, 120) == [2, 2]
        sentence = "process 1 has another request than process 0: --repeats 7 here, --repeats 20 there; give all"
        assert sentence in told(running)


@pytest.mark.slow
def test_generate_in_two_processes_is_generate_in_one(trained, tmp_path, capfd):
    words = [str(trained), "--mesh=2x2x1", "--tokens=6", "--samples=3", "--prompt=mesh axis"]
    capfd.readouterr()
    assert generate.main(words) == 0
    alone = capfd.readouterr().out
    assert alone.count("mesh axis") == 3
    assert said("jaxdist.generate", words, tmp_path / "errors") == [printable(alone), ""]


@pytest.mark.exhaustive
def test_bench_measures_what_several_processes_do(tmp_path):
    """3 processes with 2 devices each: a study on a part of one, all of one and two; and the step of 2 processes."""
    first, *rest = said("jaxdist.bench", ["scaling", *STEP, "--devices=1,2,4"], tmp_path / "errors", processes=3)
    assert rest == ["", ""]
    study = json.loads(first)
    assert [(one["devices"], one["processes"]) for one in study["measurements"]] == [(1, 1), (2, 1), (4, 2)]
    losses = [one["loss"] for one in study["measurements"]]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert (study["processes"], study["hosts"], study["cores"]) == (3, 1, len(os.sched_getaffinity(0)))
    assert study["interleaved"]
    assert "virtual devices of 3 processes on 1 host" in study["notes"][0]
    assert "leaves 1 of the 3 processes without any" in study["notes"][1]
    assert (tmp_path / "errors").read_text().count("compiled ZeRO 0 on ") == 3  # told once
    text = "\n".join(scaling_text.lines(study))
    assert "up to 4 x cpu of 3 processes, virtual: one CPU with" in text
    assert max(map(len, text.splitlines())) <= 140

    first, second = said("jaxdist.bench", ["step", *STEP, "--mesh=4x1x1"], tmp_path / "errors")
    step = json.loads(first)
    assert second == ""
    assert (step["processes"], step["devices"], step["mesh"], step["repeats"]) == (2, 4, "data=4", 2)
    assert step["tokens_per_second"] == pytest.approx(16 * 16 / step["step_seconds"])
    assert step["loss"] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.exhaustive
def test_pairs_are_learned_in_two_processes_as_in_one_with_the_reference_that_the_leader_kept(tmp_path, monkeypatch):
    """Each process has a cache of its own, and the second has lost the reference when the run is killed and goes on."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("JAXDIST_CACHE", str(cache))
    rows = [{"prompt": f"{a}?", "chosen": f" {a}.", "rejected": f" {a} of the mesh"} for a in range(60)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer_folder(tmp_path / "tokenizer")
    asked = [
        f"--data.tokenizer={tmp_path / 'tokenizer'}", "--model.vocab=330", "--train.objective=dpo", "--mesh=2x1x1",
        "--train.steps=6", "--checkpoint.every=2", "--log.every=1",
    ]  # fmt: skip
    assert train.main(argv(tmp_path / "alone", pairs, *asked)) == 0
    shutil.rmtree(cache)

    words = argv(tmp_path / "two", pairs, *asked)
    with job(jobs.train(words, 2, APART + SLOW)) as running:
        jobs.until(lambda: jobs.saved(tmp_path / "two") >= 2, running)
        for process in running:
            process.kill()
        ends(running, 60)
        assert "reference   computing" in running[0].said()
    shutil.rmtree(f"{cache}-1")
    with job(jobs.train(words, 2, APART)) as running:
        assert ends(running, 240) == [0, 0], told(running)
        said = running[0].said()
    assert "from the checkpoint of step" in said
    assert "reference   computing" not in said
    close(lines(tmp_path / "two"), lines(tmp_path / "alone"))


@pytest.mark.exhaustive
def test_adapters_learn_and_write_samples_in_two_processes_as_in_one(trained, text, tmp_path, capfd):
    """Both processes read the base, and the leader alone looks at its digest; then both resume beside it."""
    adapted = ["--model.lora-rank=2", f"--init-from={trained}", "--mesh=2x2x1", "--parallel.zero=3"]
    sampling = ["--sample.every=2", "--sample.prompts=mesh axis", "--checkpoint.every=2", "--train.steps=4"]
    assert train.main(argv(tmp_path / "alone", text, *adapted, *sampling)) == 0
    words = argv(tmp_path / "two", text, *adapted, *sampling)
    said("jaxdist.train", words, tmp_path / "errors")
    said("jaxdist.train", [*words, "--resume=2"], tmp_path / "errors")
    close(lines(tmp_path / "two"), lines(tmp_path / "alone"))
    evaluating = [str(tmp_path / "two"), "--mesh=2x1x1"]
    capfd.readouterr()
    assert evaluate.main(evaluating) == 0
    assert said("jaxdist.evaluate", evaluating, tmp_path / "more") == [capfd.readouterr().out, ""]
    samples = [
        [line.partition("sample")[2] for line in (tmp_path / name / "log.txt").read_text().splitlines()]
        for name in ("alone", "two")
    ]
    assert set(filter(None, samples[0])) == set(filter(None, samples[1]))
