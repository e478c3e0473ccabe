"""train.spike is refused where no loss of all devices decides, and where usual steps would be skipped too."""

import pytest

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
