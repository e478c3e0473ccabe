"""`train --verify`: a step of a run is compared with that of one device, and a planted mistake is found."""

import re
from types import SimpleNamespace

import jax
import pytest

from jaxdist import train
from jaxdist.config import RequestError
from jaxdist.process.exit_codes import DONE, REFUSED
from jaxdist.training.verifying import one_device
from tests.mutants.planting import plant
from tests.tiers import thinned

ROUTED = ["--model.family=moe", "--model.experts=4", "--model.experts-per-token=2"]

AGREE = [
    (["--mesh=2x2x1", "--parallel.zero=3", "--train.accumulation=2"], "reduce-scatter over data"),
    (
        ["--mesh=replica=2,data=2", "--parallel.gradient-compression=int8", "--train.local-steps=2"],
        "by int8, whose rounding depends on mesh and ZeRO stage; compared is the exact gradient",
    ),
    (["--mesh=expert=2,pipeline=2", "--pipeline.microbatches=2", *ROUTED], "all-to-all over expert"),
    (["--mesh=context=2,data=2", "--precision=mixed"], "agree to 0.05: loss"),
]


@pytest.mark.parametrize(("options", "told"), thinned(AGREE, 2))
def test_a_step_is_that_of_one_device_and_nothing_is_written(request_of, tmp_path, capsys, options, told):
    assert train.main([*request_of("run", *options), "--verify"]) == DONE
    said = capsys.readouterr().out
    assert re.search(r"a step on \S+ \S+ and on one device \(cpu:0\) agree to", said), said
    assert told in said
    assert not (tmp_path / "run").exists()


def test_one_device_is_said_to_be_compared_with_itself(request_of, capsys):
    assert train.main([*request_of("run", "--mesh=1x1x1"), "--verify"]) == DONE
    said = capsys.readouterr().out
    assert said.startswith("a step on one device (cpu:0) and again on it agree to 0.0001: loss "), said
    assert said.endswith("such as 2x1x1, to compare it\n"), said


RING = ["--mesh=context=2,data=2", "--parallel.context=ring"]
PLANTED = [
    ("jaxdist.parallel.context.Ring.gradients", RING, r"gradients differ, most of all blocks.attention.qkv"),
    ("jaxdist.parallel.context.Ring._earlier", RING, r"loss is \S+ on the mesh and \S+ on one device"),
]


@pytest.mark.parametrize(("mistake", "options", "told"), thinned(PLANTED, 2))
def test_a_planted_mistake_is_found(request_of, monkeypatch, capsys, mistake, options, told):
    plant(monkeypatch, mistake)
    assert train.main([*request_of("run", *options), "--verify"]) == REFUSED
    assert re.search(told, capsys.readouterr().out)


@pytest.mark.slow
def test_adapters_begin_beside_the_base_that_is_given(run, request_of, tmp_path, capsys):
    base = run("base", "--train.steps=4")
    options = [f"--init-from={base}", "--model.lora-rank=2", "--model.lora-base=int8", "--mesh=2x1x1"]
    capsys.readouterr()
    assert train.main([*request_of("run", *options), "--verify"]) == DONE
    loss = float(re.search(r"loss (\S+);", capsys.readouterr().out)[1])
    assert loss < 5.6  # that of new weights is the logarithm of 300
    assert not (tmp_path / "run").exists()


def test_what_one_device_cannot_do_is_refused(request_of):
    asynchronous = ["--mesh=1x1x2", "--pipeline.schedule=pipedream", "--optimizer.clip=0"]
    with pytest.raises(RequestError, match="no step of it is one of one device; set it to 1f1b"):
        train.main([*request_of("run", *asynchronous), "--verify"])
    with pytest.raises(RequestError, match="leave one of them out"):
        train.main([*request_of("run"), "--verify", "--dry-run"])


@pytest.mark.parametrize(
    ("platform", "memory", "on_first"),
    [
        ("gpu", {"bytes_limit": 100, "bytes_in_use": 20}, True),
        ("gpu", {"bytes_limit": 100, "bytes_in_use": 60}, False),
        ("gpu", {}, True),
        ("gpu", None, True),
        ("cpu", {"bytes_limit": 1}, True),
    ],
)
def test_the_hosts_cpu_takes_the_step_that_does_not_fit(platform, memory, on_first):
    first = SimpleNamespace(platform=platform, memory_stats=lambda: memory)
    found = one_device(SimpleNamespace(first_device=first), needed=50)
    assert found is (first if on_first else jax.local_devices(backend="cpu")[0])
