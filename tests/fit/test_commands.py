"""What the commands that read a run do with the folder of `jaxdist.fit`, which has no config.toml."""

import json
import re

import numpy as np
import pytest

from jaxdist import checkpoints, evaluate, generate, train
from jaxdist.config import RequestError
from jaxdist.doctor import __main__ as doctor
from jaxdist.training.meter import Diverged
from tests.fit.conftest import batch_of, fit


@pytest.fixture(scope="module")
def folder(four, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "fitted"
    fit(folder, batch_of, four, steps=4, checkpoint_every=1, checkpoint_keep=4)
    return folder


def steps(folder, capsys, *options: str, code: int = 0) -> list[tuple[int, str]]:
    assert checkpoints.main([str(folder), "--json", *options]) == code
    return [(row["step"], row["state"]) for row in json.loads(capsys.readouterr().out)["checkpoints"]]


def test_its_checkpoints_are_listed_verified_and_pruned(folder, capsys):
    assert steps(folder, capsys) == [(step, "complete") for step in (1, 2, 3, 4)]
    assert steps(folder, capsys, "--verify") == [(step, "whole") for step in (1, 2, 3, 4)]
    with pytest.raises(RequestError, match=r"--prune cannot know how many checkpoints this run of jaxdist.fit keeps"):
        checkpoints.main([str(folder), "--prune"])
    assert steps(folder, capsys, "--prune", "--checkpoint.keep=2") == [(3, "complete"), (4, "complete")]


def test_a_damaged_step_is_found(folder, capsys):
    largest = max((folder / "checkpoints/4").rglob("*"), key=lambda path: path.is_file() and path.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert (4, "damaged") in steps(folder, capsys, "--verify", code=1)
    largest.write_bytes(content)


def test_the_doctor_reads_its_heartbeats(folder, capsys):
    assert doctor.main([str(folder)]) == 0
    assert "nothing is wrong with it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("main", "options", "name"),
    [
        (checkpoints.main, ["--export", "weights.safetensors"], "--export"),
        (evaluate.main, [], "evaluate"),
        (generate.main, [], "generate"),
        (train.main, [], "this command"),
    ],
)
def test_what_needs_a_config_names_the_script(main, options, name, folder):
    sentence = f"'{folder}' holds a run of jaxdist.fit, without the config.toml that {name} needs; let the script"
    with pytest.raises(RequestError, match=re.escape(sentence)) as found:
        main([str(folder), *options])
    assert len(found.value.problems) == 1


def test_the_doctor_says_that_a_run_has_failed_and_why(four, tmp_path, capsys):
    def bad(step):
        return {name: np.full_like(value, np.nan) for name, value in batch_of(step).items()}

    with pytest.raises(Diverged):
        fit(tmp_path / "bad", bad, four, steps=4, train_max_skipped=2)
    assert doctor.main([str(tmp_path / "bad")]) == 2
    said = capsys.readouterr().out
    assert re.search(r"process 0 on \S+ failed with exit code 1, step 2", said)
    assert "log.txt: stopped: 2 steps in a row up to step 2 were not finite" in said
