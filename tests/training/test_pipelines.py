"""Runs whose layers are stages: other meshes, with other stages or none, go on with them and read them."""

import shutil
from types import SimpleNamespace

import jax
import pytest

from jaxdist import evaluate, generate, train
from jaxdist.config import PipelineConfig, RequestError
from jaxdist.mesh import devices_asked, parse_mesh
from jaxdist.planning import communication, memory
from jaxdist.request import load
from jaxdist.training import engine
from jaxdist.training import restore as restoring
from jaxdist.training.run import Run
from tests.planning.pipelines import config, laid
from tests.planning.sharded import sharded_by
from tests.training.conftest import SMALL, over
from tests.training.curves import close, lines

RECOMPUTED = ("--mesh=1x1x2", "--model.remat=stage", "--pipeline.microbatches=2", "--train.steps=10")


@pytest.fixture(scope="module")
def recomputed(tmp_path_factory, text):
    """A finished run of two stages that recomputes them, with checkpoints of steps 5 and 10."""
    folder = tmp_path_factory.mktemp("runs") / "recomputed"
    assert train.main(over(SMALL, f"--data.path={text}", f"--run-dir={folder}", *RECOMPUTED)) == 0
    return folder


@pytest.mark.slow
def test_a_run_that_recomputes_stages_goes_on_where_there_are_none(recomputed, request_of, run, tmp_path, capsys):
    """A filled pipeline axis is 1 here, of which the summary tells."""
    shutil.copytree(recomputed, tmp_path / "gone on")
    shutil.rmtree(tmp_path / "gone on" / "checkpoints" / "10")
    folder = run("gone on", *RECOMPUTED, "--mesh=1x1x-1")
    told = capsys.readouterr().err
    assert "from the checkpoint of step 5" in told
    assert "mesh 1x1x-1 has no stages here, so model.remat stage recomputes blocks" in told
    assert "pipeline.microbatches is 2, but mesh 1x1x-1, whose pipeline axis is 1, does not use it" in told
    assert len(lines(folder)) == 11
    close(lines(folder), lines(recomputed))


@pytest.fixture
def read(recomputed, capsys):
    """What a person is told by the commands that read the run, with these options."""

    def call(*options: str) -> str:
        assert evaluate.main([str(recomputed), *options]) == 0
        assert generate.main([str(recomputed), "--tokens=8", "--temperature=0", *options]) == 0
        return capsys.readouterr().out

    return call


@pytest.mark.slow
def test_readers_need_no_stages_and_take_a_schedule_of_their_own(recomputed, read, monkeypatch):
    asked, restore = [], restoring.restore
    keep = lambda config, *rest, **more: asked.append(config) or restore(config, *rest, **more)
    monkeypatch.setattr(restoring, "restore", keep)
    told = read()
    assert "validation loss" in told
    assert read("--mesh=1x1x-1") == told
    assert read("--pipeline.schedule=gpipe", "--pipeline.microbatches=4") == told
    own, other = PipelineConfig(microbatches=2), PipelineConfig(schedule="gpipe", microbatches=4)
    assert [one.pipeline for one in asked] == [own] * 4 + [other] * 2
    assert [one.mesh for one in asked] == ["1x1x2"] * 2 + ["1x1x-1"] * 2 + ["1x1x2"] * 2
    with pytest.raises(RequestError, match=r"pipeline.microbatches 16"):
        evaluate.main([str(recomputed), "--pipeline.microbatches=16"])


@pytest.mark.parametrize("mesh", ["1x1x1", "4x1x1", "1x2x1"])
def test_predictions_of_stages_that_are_none_are_those_of_blocks(mesh):
    staged, blocks = (config(mesh, remat=remat) for remat in ("stage", "block"))
    model = Run(blocks, devices=jax.devices()[: devices_asked(parse_mesh(mesh))]).model
    one, other = (sharded_by(asked, model, laid(asked)) for asked in (staged, blocks))
    assert memory.predict(one) == memory.predict(other)
    assert communication.predict(one) == communication.predict(other)


@pytest.mark.slow
def test_validation_is_that_of_one_device(text):
    """Of the first of two batches, and of both, the second of which is filled up. One device needs no filling: it takes
    four rows at a time."""
    sizes = dict(option.removeprefix("--").replace("-", "_").split("=") for option in SMALL)
    whole = {"mesh": "1x1x1", "train.global_batch_size": "4"}
    stages = {"mesh": "2x1x2", "train.global_batch_size": "20", "pipeline.microbatches": "2"}
    found = []
    for asked, batches in ((whole, 5), (stages, 1)):
        run = Run(load(None, sizes | asked | {"data.path": str(text)}))
        with jax.set_mesh(run.mesh):
            state = run.engine.init()
            found.append([run.validate(state.params, state.variables, count)["loss"] for count in (batches, 0)])
    assert run.task.data.validation.count == 24
    assert abs(found[0][0] - found[0][1]) > 1e-4
    assert found[1] == pytest.approx(found[0], rel=1e-6)


def compiled(monkeypatch, schedule: str, problems) -> str:
    """What `Run.compile` gives where a program, which is not made, has these problems across ranks."""
    run = Run(config("1x1x2", schedule, remat="none"), devices=jax.devices()[:2])
    program = SimpleNamespace(as_text=lambda: f"program of {schedule}")
    monkeypatch.setattr(run, "lower", lambda: SimpleNamespace(compile=lambda: program))
    monkeypatch.setattr(engine, "across_ranks", problems)
    return run.compile().as_text()


def test_a_program_in_which_ranks_could_wait_for_ever_is_refused(monkeypatch):
    asked = []
    problems = lambda text, mesh: asked.append((text, mesh.shape["pipeline"])) or ["%1 crosses", "%2 crosses"]
    with pytest.raises(RequestError, match=r"^zb-h1 cannot run here \(%1 crosses\); set pipeline.schedule to 1f1b$"):
        compiled(monkeypatch, "zb-h1", problems)
    assert asked == [("program of zb-h1", 2)]
    assert compiled(monkeypatch, "zb-h1", lambda *_: []) == "program of zb-h1"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-u"])
def test_a_program_in_which_all_ranks_do_the_same_is_not_asked_about(monkeypatch, schedule):
    problems = lambda *_: pytest.fail("ranks never go their own way")
    assert compiled(monkeypatch, schedule, problems) == f"program of {schedule}"
