"""The programs in `examples/course/`: each shows what its page says."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from jaxdist import train
from jaxdist.launch import slurm_launch, slurm_script
from jaxdist.process.exit_codes import DONE
from jaxdist.request import load
from tests import forks

COURSE = Path(__file__).parent.parent / "examples" / "course"


def told_by(name: str) -> str:
    """What a program prints in a process of its own, which has no devices yet."""
    done = forks.run([sys.executable, str(COURSE / name)], env={**os.environ, "XLA_FLAGS": ""})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_each_program_has_a_row_in_the_table_and_says_how_it_is_run():
    page = (COURSE / "README.md").read_text()
    names = {path.name for path in COURSE.iterdir() if path.suffix in (".py", ".sh", ".toml")}
    assert {*re.findall(r"^\| \[.*?\]\((.*?)\)", page, re.MULTILINE)} == names
    for name in names:
        text = (COURSE / name).read_text()
        (command,) = re.findall(rf"^(?:.* )?examples/course/{name}.*$", page, re.MULTILINE)
        assert command in text
        assert re.search(r"^(# )?The usual original .*", text, re.MULTILINE)
        assert "import torch" not in text


@pytest.mark.slow
def test_ddp_reads_each_row_once_in_a_new_order_and_averages_over_the_ranks():
    told = told_by("ddp.py")
    epochs = re.findall(r"^epoch \d  loss (\S+)  1001 rows read, 1001 of them once$", told, re.MULTILINE)
    first, *_, last = map(float, epochs)
    assert len(epochs) == 3
    assert last < 0.2 * first
    assert "3 orders in 3 epochs" in told
    everywhere, ranks = re.search(r"^loss of 64 rows (\S+); of each rank's (.*)$", told, re.MULTILINE).groups()
    losses = [float(one) for one in ranks.split()]
    assert sum(losses) / 4 == pytest.approx(float(everywhere), abs=2e-6)
    assert max(losses) - min(losses) > 0.01


@pytest.mark.slow
def test_fsdp_scatters_the_sums_and_learns_what_one_device_does():
    fsdp, ddp, one = told_by("fsdp.py").splitlines()
    losses = [float(re.search(r"loss (\S+)", line)[1]) for line in (one, ddp, fsdp)]
    assert losses == pytest.approx([losses[0]] * 3, abs=2e-6)
    assert ddp.endswith(": 1 all-reduce")
    assert fsdp.endswith("holds 1x4 of each weight  sends 48: 2 all-gather, 2 reduce-scatter")


@pytest.mark.exhaustive
def test_stages_learn_what_one_device_does_and_wait_less_with_micro_batches():
    told = told_by("two_stages.py").splitlines()
    losses = [float(re.search(r"loss (\S+),", line)[1]) for line in told]
    assert losses == pytest.approx([losses[0]] * 3, abs=2e-6)
    assert [line.split("waits ")[1] for line in told] == [f"{idle} of the time" for idle in ("1/9", "1/2", "0")]


def test_the_job_script_asks_for_a_signal_and_goes_on(monkeypatch):
    monkeypatch.chdir(COURSE.parent.parent)
    command = (COURSE / "slurm.sh").read_text().split("jaxdist.launch slurm ")[1]
    words = command.replace("\\\n", " ").replace('"$@"', "").split()
    text = slurm_script(slurm_launch(words)).text()
    for asked in ("nodes=4", "gpus-per-node=1", "cpus-per-task=4", "time=1:00:00", "signal=B:USR1@90", "requeue"):
        assert f"#SBATCH --{asked}\n" in text
    assert "29500" not in text


CONFIGS = {
    "deepspeed.toml": (2, 256, 4),
    "fsdp.toml": (3, 32, 1),
}
"""Of each: ZeRO stage, rows of a step, micro-batches."""


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_says_what_the_other_one_does(name):
    config = load(str(COURSE / name), {})
    assert (config.parallel.zero, config.train.global_batch_size, config.train.accumulation) == CONFIGS[name]
    assert config.precision == "bfloat16"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_trains(name, tmp_path):
    assert train.main([str(COURSE / name), "--run-dir", str(tmp_path / "run")]) == DONE
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 5
    assert lines[-1]["validation_loss"] < 6.2  # ln(512) is 6.24
