"""Knobs of long runs: what train.spike does not go with, and which commands do not take what only training uses."""

import pytest

from jaxdist import evaluate, generate
from jaxdist.config import RequestError
from jaxdist.request import load

REPLICAS = {"mesh": "replica=2", "parallel.replica_zero": "true"}

REFUSED = {
    "so few standard deviations": {"train.spike": "2"},
    "train.local_steps 10": REPLICAS | {"train.local_steps": "10"},
    "parallel.delayed_gradients": REPLICAS | {"parallel.delayed_gradients": "true"},
    "pipeline.schedule pipedream": {"mesh": "1x1x2", "pipeline.schedule": "pipedream", "optimizer.clip": "0"},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_with_it_is_refused(words):
    with pytest.raises(RequestError) as caught:
        load(None, {"train.spike": "6"} | REFUSED[words])
    (problem,) = (one for one in caught.value.problems if "train.spike is" in one)
    assert words in problem
    assert "; set " in problem


@pytest.mark.parametrize("command", [evaluate, generate])
@pytest.mark.parametrize("word", ["--data.skip=3", "--fault.compare=5"])
def test_commands_without_a_step_do_not_take_what_only_a_step_uses(command, word, tmp_path):
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(RequestError, match=rf"^{word.partition('=')[0]} has no effect on this command; leave it out"):
        command.main([str(tmp_path), word])
