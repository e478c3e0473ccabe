"""Which requests go on with a run, which are refused and by which names: those that somebody has asked for."""

import shutil

import pytest

from jaxdist import train
from jaxdist.config import RequestError
from jaxdist.request import load
from jaxdist.training.checkpoint.step_dir import StepDir
from jaxdist.training.entering import enter
from jaxdist.training.resume_check import differing, lengthened
from jaxdist.training.run_dir import STEP_DIRS, RunFolder
from tests.tiers import exhaustive
from tests.training.curves import close, lines
from tests.training.test_step_dir import put


def asked(**knobs):
    return load(None, {name.replace("__", "."): str(value) for name, value in knobs.items()})


ADAPTED = dict(init_from="base", model__lora_rank=2)


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        (dict(train__steps=10), dict(train__steps=20), ["train.steps"]),  # and no warm-up of 2 and 4
        (dict(train__steps=10), dict(train__steps=10, optimizer__warmup=2), []),
        (dict(train__steps=10), dict(train__steps=20, optimizer__warmup=3), ["optimizer.warmup", "train.steps"]),
        (dict(train__steps=10, optimizer__warmup=3), dict(train__steps=20), ["optimizer.warmup", "train.steps"]),
        (dict(train__steps=10), dict(train__epochs=2), ["train.epochs"]),  # and no 150 steps, which nobody has set
        (dict(train__epochs=1), dict(train__steps=10), ["train.epochs"]),
        (dict(train__epochs=1), dict(train__epochs=1), []),
        (dict(), dict(optimizer__learning_rate=0.5), ["optimizer.learning_rate"]),
        (dict(), dict(mesh="replica=2,data=2", parallel__zero=1), []),
        (dict(), dict(parallel__gradient_compression="int8"), ["parallel.gradient_compression"]),
        (
            dict(parallel__gradient_compression="topk-int8"),
            dict(parallel__gradient_compression="topk-int8", parallel__compression_density=0.02),
            ["parallel.compression_density"],
        ),
        (dict(), dict(parallel__delayed_gradients=True), ["parallel.delayed_gradients"]),
        (ADAPTED, ADAPTED | dict(init_from="moved"), []),
        (ADAPTED, dict(model__lora_rank=2), ["init_from"]),
        (ADAPTED, dict(init_from="base", model__lora_rank=4), ["model.lora_rank"]),
        (ADAPTED, ADAPTED | dict(model__lora_alpha=1), ["model.lora_alpha"]),
        (ADAPTED, dict(init_from="base"), ["model.lora_rank"]),
        (dict(init_from="base"), dict(init_from="moved"), ["init_from"]),
    ],
)
def test_what_follows_from_other_knobs_is_not_compared(old, new, names):
    assert differing(asked(**old), asked(**new)) == names


@pytest.mark.parametrize("name", STEP_DIRS)
def test_steps_bind_a_run_to_its_config_wherever_they_lie(tmp_path, name):
    """The newest, the best, and those set aside: without any the run has learned nothing that another config loses."""
    folder, own, other = RunFolder(tmp_path), asked(), asked(optimizer__learning_rate=0.5)
    folder.write(own, tokenizer=None, special=None, devices=[], more={})
    assert enter(folder, other) == other
    put(StepDir(tmp_path / name), 5)
    assert enter(folder, own) == own
    with pytest.raises(RequestError, match=r"another config: optimizer\.learning_rate"):
        enter(folder, other)
    folder.config.unlink()
    with pytest.raises(RequestError, match=r"holds checkpoints but not the config\.toml"):
        enter(folder, own)


@pytest.mark.parametrize("knob", ["path", "validation_path"])
def test_data_may_move_until_the_run_is_finished(tmp_path, monkeypatch, knob):
    """They are known again by their content, which nobody reads after the last step."""
    for name in "ab":
        (tmp_path / name).write_text("A text.")
    own = asked(data__path=tmp_path / "a")
    folder, moved = RunFolder(tmp_path / "run"), own.with_knobs({f"data.{knob}": str(tmp_path / "b")})
    folder.write(own, tokenizer=None, special=None, devices=[], more={})
    put(StepDir(folder.checkpoints), 5)
    assert enter(folder, moved) == moved
    monkeypatch.setattr(StepDir, "last_step", lambda steps, asked, thorough: 5)
    assert enter(folder, own) == own
    with pytest.raises(RequestError, match=rf"finished with other data: data\.{knob} \(.* there, .*b here\); name"):
        enter(folder, moved)


CONSTANT = dict(optimizer__schedule="constant")
ROOT = dict(optimizer__schedule="inverse-sqrt")


@pytest.mark.parametrize(
    ("old", "new", "step", "told"),
    [
        (CONSTANT, CONSTANT, 16, "train.steps is raised from 20 to 40"),
        (CONSTANT, CONSTANT, 17, "train.steps is raised from 20 to 40; the learning rate, which has decayed since step "
         "16, goes back up"),
        (CONSTANT | dict(optimizer__decay_fraction=0), CONSTANT | dict(optimizer__decay_fraction=0), 20,
         "train.steps is raised from 20 to 40"),
        (ROOT, ROOT, 16, "train.steps is raised from 20 to 40"),
        (CONSTANT, CONSTANT, 3, None),  # the warm-up takes 4 steps
        (CONSTANT, CONSTANT | dict(model__layers=3), 20, None),
        (dict(), dict(), 20, None),  # cosine
        (CONSTANT, CONSTANT | dict(train__steps=19), 20, None),
        (CONSTANT, CONSTANT | dict(train__steps=20), 20, None),
    ],
)  # fmt: skip
def test_steps_may_be_raised_where_the_learning_rate_so_far_stays(old, new, step, told):
    assert lengthened(asked(train__steps=20, **old), asked(**({"train__steps": 40} | new)), step) == told


def rates(folder):
    return {line["step"]: line["learning_rate"] for line in lines(folder) if "loss" in line}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "moments"), [("muon", "int8"), *exhaustive([("adamw", "bfloat16"), ("adafactor", "float32")])]
)
def test_a_longer_run_goes_on_and_is_the_run_that_was_long_from_the_start(run, tmp_path, capsys, name, moments):
    """To the bit, and on another mesh to 1e-5: its learning rate is the same in each step, and so are its losses."""
    endless = (
        f"--optimizer.name={name}",
        f"--optimizer.moments={moments}",
        "--model.embed=32",
        "--optimizer.schedule=inverse-sqrt",
        "--optimizer.decay-fraction=0",
        "--validation.every=0",
        "--mesh=1x1x1",
    )
    folder = run("run", *endless, "--train.steps=8")
    shutil.copytree(folder, tmp_path / "moved", symlinks=True)
    capsys.readouterr()
    run("run", *endless, "--train.steps=12")
    said = capsys.readouterr().err
    assert "train.steps is raised from 8 to 12\n" in said
    assert "train.steps is raised from 8 to 12\n" in (folder / "log.txt").read_text()
    assert load(str(folder / "config.toml"), {}).train.steps == 12
    straight = run("straight", *endless, "--train.steps=12")
    assert rates(folder) == rates(straight)
    losses = [[line["loss"] for line in lines(one) if "loss" in line] for one in (folder, straight)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 12
    moved = run("moved", *endless, "--mesh=2x1x1", "--train.steps=12")
    close(*([line for line in lines(one) if "loss" in line] for one in (moved, straight)))
    run("run", *endless, "--train.steps=12")
    assert "is finished at step 12" in capsys.readouterr().err


def test_a_refusal_names_what_was_asked_for_and_a_way_to_go_on_with_the_weights(run, request_of):
    own = [word for word in request_of("run", "--train.steps=10") if not word.startswith("--optimizer.warmup")]
    assert train.main(own) == 0
    longer = [word for word in own if not word.startswith("--train.steps")] + ["--train.steps=20"]
    with pytest.raises(RequestError) as error:
        train.main(longer)
    told = str(error.value)
    assert "another config: train.steps (10 there, 20 here); train.steps can be raised, " in told
    assert "optimizer.warmup" not in told
    assert told.endswith("name another --run-dir, where --init-from begins with the weights of this run")
