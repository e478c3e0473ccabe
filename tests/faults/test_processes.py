"""Several processes are one run: the curve of one, and checkpoints that any number of processes goes on from."""

import shutil

import jax
import numpy as np
import pytest

from jaxdist import train as command
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.forward.step import Step
from tests.faults.jobs import argv, ends, job, metrics, saved, train, until
from tests.processes import free_port
from tests.tiers import exhaustive
from tests.training.curves import close

DUMP = """
import jax, numpy as np
from jax.experimental import multihost_utils
def dump(path, state):
    whole = lambda x: np.asarray(x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True))
    leaves = [whole(leaf) for leaf in jax.tree.leaves((state.params, state.optimizer))]
    if me == 0:
        np.savez(path, *leaves)
"""

DUMP_SAVED = (
    DUMP
    + """
save = Trainer.save
def save_and_dump(self, step, state):
    if step == 5:
        dump(PATH, self.save_policy.engine.step.logical(state))
    save(self, step, state)
Trainer.save = save_and_dump
"""
)

DUMP_RESTORED = (
    DUMP
    + """
resume = Step.resume
def dump_and_resume(self, state):
    dump(PATH, state)
    return resume(self, state)
Step.resume = dump_and_resume
"""
)


def torchrun(commands: list[list[str]]) -> list[tuple[list[str], dict[str, str]]]:
    """The same commands with variables in place of options."""
    place = {"WORLD_SIZE": str(len(commands)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    own = lambda i: place | {"RANK": str(i), "LOCAL_RANK": str(i), "LOCAL_WORLD_SIZE": place["WORLD_SIZE"]}
    plain = lambda words: [word for word in words if not word.startswith("--cluster.")]
    return [(["env", *(f"{k}={v}" for k, v in own(i).items()), *plain(words)]) for i, words in enumerate(commands)]


@pytest.mark.slow
def test_two_processes_have_the_curve_of_one(text, tmp_path):
    """Started as torchrun does it, four devices in two processes; gloo's own words are not on standard output."""
    options = ("--mesh=4x1x1", "--parallel.zero=2", "--train.steps=6", "--validation.every=3")
    assert command.main(argv(tmp_path / "one", text, *options)) == 0
    words = torchrun(train(argv(tmp_path / "two", text, *options), 2))
    with job(words) as running:
        assert ends(running, 240) == [0, 0]
        assert "with 2, 2 devices" in running[0].said()
        assert running[1].said() == ""
        assert "Gloo" not in running[0].said()
    close(metrics(tmp_path / "two"), metrics(tmp_path / "one"))
    assert len(metrics(tmp_path / "two")) == 6 + 2
    assert 'coordinator = ""' in (tmp_path / "two" / "config.toml").read_text()  # it can be used as CONFIG


@pytest.mark.exhaustive
def test_two_processes_share_each_row_and_have_the_curve_of_one_device(text, tmp_path):
    """Keys and values cross from process to process, and each reads its own part of the rows, to validate on too."""
    options = ("--model.dropout=0.1", "--train.steps=10", "--validation.every=5")
    assert command.main(argv(tmp_path / "one", text, *options, "--mesh=1x1x1")) == 0
    shared = ("--mesh=context=2", "--parallel.context=ring", "--parallel.zero=3")
    with job(train(argv(tmp_path / "two", text, *options, *shared), 2)) as running:
        assert ends(running, 240) == [0, 0]
    close(metrics(tmp_path / "two"), metrics(tmp_path / "one"))


SPOILT = """
import jax
import numpy as np
logical = Step.logical
def spoil(self, state):
    state = logical(self, state)
    if me == 0 or isinstance(state.step, jax.core.Tracer) or int(state.step) < 4:
        return state
    copy = lambda shard: jax.device_put(np.full(shard.data.shape, np.nan, np.float32), shard.device)
    nan = lambda a: [copy(shard) for shard in a.addressable_shards]
    spoilt = lambda a: jax.make_array_from_single_device_arrays(a.shape, a.sharding, nan(a))
    return state._replace(params=jax.tree.map(spoilt, state.params))
Step.logical = spoil
"""


@pytest.mark.slow
def test_no_process_saves_a_state_that_is_not_finite_in_one_of_them(text, tmp_path):
    options = ("--mesh=4x1x1", "--checkpoint.every=2", "--validation.every=0")
    with job(train(argv(tmp_path / "run", text, *options), 2, SPOILT)) as running:
        assert ends(running, 240) == [1, 1]
        last = running[0].said().splitlines()[-1]
        assert last.startswith("stopped: params.")
        assert last.endswith(
            " holds NaN or infinity after step 4, which is not saved; the last good checkpoint is that of step 2"
        )
        assert running[1].said() == ""
    assert StepDir(tmp_path / "run" / "checkpoints").steps() == [2]


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """(the folder of a run of 2 processes, ZeRO 3 on 2x2x1, and what its step 5 held)."""
    base = tmp_path_factory.mktemp("trained")
    patch = DUMP_SAVED.replace("PATH", repr(str(base / "5.npz")))
    options = ("--mesh=2x2x1", "--parallel.zero=3", "--train.steps=10", "--model.layers=2", "--checkpoint.keep=9")
    with job(train(argv(base / "run", text, *options), 2, patch)) as running:
        assert ends(running, 240) == [0, 0]
    return base / "run", np.load(base / "5.npz")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "options"),
    [
        (1, ["--mesh=1x2x2", "--parallel.zero=0", "--pipeline.schedule=1f1b", "--pipeline.microbatches=4"]),
        (4, ["--mesh=4x1x1", "--parallel.zero=0"]),
        *exhaustive([(1, ["--mesh=1x1x1", "--parallel.zero=0"]), (1, ["--mesh=8x1x1", "--parallel.zero=3"])]),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else value[0],
)
def test_its_checkpoint_goes_on_anywhere(trained, text, tmp_path, processes, options, monkeypatch, capsys):
    """What is restored is what was saved, to the bit; the next five losses are those of the run, to 1e-5."""
    source, step5 = trained
    folder = tmp_path / "run"
    shutil.copytree(source, folder)
    for name in ("10", "sums/10.json", "best"):
        path = folder / "checkpoints" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    (folder / "loss.png").unlink()
    words = argv(folder, text, "--train.steps=10", "--model.layers=2", "--checkpoint.keep=9", *options)
    dumped = tmp_path / "restored.npz"
    if processes == 1:
        resume = Step.resume

        def dump_and_resume(self, state):
            np.savez(dumped, *jax.device_get(jax.tree.leaves((state.params, state.optimizer))))
            return resume(self, state)

        monkeypatch.setattr(Step, "resume", dump_and_resume)
        assert command.main(words) == 0
        said = capsys.readouterr().err
    else:
        with job(train(words, processes, DUMP_RESTORED.replace("PATH", repr(str(dumped))))) as running:
            assert ends(running, 240) == [0] * processes
            said = running[0].said()
    assert "from the checkpoint of step 5" in said
    restored = np.load(dumped)
    assert len(restored.files) == len(step5.files) > 10
    for name in step5.files:
        np.testing.assert_array_equal(restored[name], step5[name])
    close(metrics(folder), metrics(source))


SLOW = """
take = Trainer.step
def slowly(self, step, *more):
    if step > 5:
        time.sleep(0.5)
    return take(self, step, *more)
Trainer.step = slowly
"""
"""Leaves time between the first checkpoint, which is written in the background, and the end."""


@pytest.mark.exhaustive
def test_killed_processes_that_resume_still_owe_what_they_have_rounded_off(text, tmp_path):
    """Each of two replicas in a process of its own: the same figures, to the bit, as without the kill.

    A checkpoint has the weights of one replica alone. So this also fails if their weights differ in the last bit, as
    they do where a fused multiply-add rounds one of two codes and not the other.
    """
    options = (
        "--mesh=replica=2", "--parallel.gradient-compression=int8", "--model.embed=64", "--train.steps=10",
        "--checkpoint.every=3",
    )  # fmt: skip
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    with job(train(argv(straight, text, *options), 2)) as running:
        assert ends(running, 240) == [0, 0]
    with job(train(argv(killed, text, *options), 2, patch=SLOW)) as running:
        until(lambda: saved(killed) >= 3, running)
        for process in running:
            process.kill()
        ends(running, 120)
    before = saved(killed)
    assert before < 10
    with job(train(argv(killed, text, *options), 2)) as running:
        assert ends(running, 240) == [0, 0]
        assert f"step {before}" in running[0].said()
    figures = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in metrics(one) if "loss" in line]
        for one in (straight, killed)
    ]
    assert len(figures[0]) == 10
    assert figures[1] == figures[0]
