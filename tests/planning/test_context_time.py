"""How long attention takes over `context`: a ring step by step, Ulysses call by call, against numbers by hand."""

from dataclasses import replace

import numpy as np
import pytest

from jaxdist.mesh import CONTEXT
from jaxdist.models import build_decoder
from jaxdist.planning.clusters import cluster
from jaxdist.planning.collective_time import START
from jaxdist.planning.layer_time import attention
from jaxdist.planning.search.estimate import estimate
from jaxdist.planning.search.ring_time import Messages, ring_waits
from jaxdist.request import load

H100 = cluster("h100-ndr")

FREE = replace(H100, overlap=1.0)
"""What runs at once does not slow each other down."""

LAYERS = 2


def config_of(mesh: str, form: str = "auto", **more: str):
    """Return a small llama with 8 query and 4 key/value heads of 64 numbers, on rows of 8192 tokens."""
    asked = {
        "mesh": mesh,
        "precision": "bfloat16",
        "parallel.context": form,
        "model.layers": str(LAYERS),
        "model.embed": "512",
        "model.heads": "8",
        "model.kv_heads": "4",
        "model.sequence": "8192",
        "train.global_batch_size": "8",
    }
    return load("llama_1b", asked | {name.replace("__", "."): text for name, text in more.items()})


def predicted(config, where=H100):
    return estimate(config, build_decoder(config.model), where)


def test_a_ring_waits_for_nothing_that_its_steps_are_longer_than_but_the_last_hop():
    waits = ring_waits(4, 4.0, 10.0, Messages(keys=0.5, sums=1.0), FREE)
    assert waits.forward == 0
    assert waits.backward == 0.5


def test_a_step_of_a_ring_takes_as_long_as_the_longer_of_its_work_and_its_messages():
    forward, backward = 4.0, 10.0  # steps of 1 and 2.5
    keys, sums = 3.0, 5.0
    waits = ring_waits(4, forward, backward, Messages(keys, sums), FREE)
    assert forward + waits.forward == 3 * max(1, keys) + 1
    steps = [max(2.5, keys), *[max(2.5, keys + sums)] * 2, max(2.5, sums)]
    assert backward + waits.backward == sum(steps) + keys


def test_a_ring_of_two_sends_keys_and_sums_in_different_steps():
    waits = ring_waits(2, 2.0, 4.0, Messages(keys=3.0, sums=5.0), FREE)
    assert waits.forward == 2
    assert waits.backward == (3 - 2) + (5 - 2) + 3


def test_a_ring_of_one_device_waits_for_nothing():
    waits = ring_waits(np.array([1, 2]), 1.0, 1.0, Messages(keys=9.0, sums=9.0), FREE)
    assert (waits.forward > 0).tolist() == [False, True]
    assert (waits.backward > 0).tolist() == [False, True]


@pytest.mark.parametrize("remat", ["none", "block"])
def test_the_messages_of_a_ring_are_those_of_its_links(remat):
    """Where nothing is hidden, because attention takes no time."""
    fast = replace(FREE, peak=1e30)
    config = config_of("context=4", "ring", model__remat=remat)
    array = 8 * 2048 * 4 * 64  # rows, tokens, heads, numbers: of keys, or of values

    def message(width: int) -> float:
        return 2 * (START + fast.inside.latency + width * array / fast.inside.bandwidth)

    keys, sums = message(2), message(4)
    forwards = 2 if remat == "block" else 1
    layer = forwards * 3 * keys + (3 * keys + 3 * sums) + keys
    assert predicted(config, fast).parts[CONTEXT] == pytest.approx(LAYERS * layer)


def test_ulysses_waits_for_all_that_it_exchanges():
    config = config_of("context=4", "ulysses", model__remat="none")
    found = predicted(config)
    exchanged = 2 * 8 * 2048 * (2 * 8 + 2 * 4) * 64 / 4  # bytes of each of the four arrays, on average
    call = START + 3 * H100.inside.latency + exchanged / 4 * 3 / H100.inside.bandwidth
    assert found.parts[CONTEXT] == pytest.approx(LAYERS * 8 * call)
    assert found.sent(CONTEXT) == pytest.approx(LAYERS * 8 * exchanged * 3 / 4)


def test_devices_share_the_work_of_a_row_evenly():
    """All of a causal row on one device takes four times as long as on four, and counts once."""
    alone = predicted(config_of("context=1"))
    shared = predicted(config_of("context=4", "ring"))
    assert alone.parts["arithmetic"] == pytest.approx(4 * shared.parts["arithmetic"], rel=0.02)
    flops = shared.mfu * shared.seconds * 4
    assert flops == pytest.approx(alone.mfu * alone.seconds)


def test_gradients_over_context_are_not_attention():
    """ZeRO gathers over `context` too; that is neither a message of a ring nor an exchange of Ulysses."""
    plain = predicted(config_of("context=4", "ring"))
    sharded = predicted(config_of("context=4", "ring", parallel__zero="3"))
    assert sharded.sent(CONTEXT) == plain.sent(CONTEXT)
    assert sharded.sent("data") == pytest.approx(plain.sent("data") * (4 + 2 * 2) / 8, rel=0.1)


def test_documents_are_computed_in_full_by_a_slower_kernel():
    joined = attention(config_of("context=4", "ring"), H100, 1024, 1, ring=True)
    apart = attention(config_of("context=4", "ring", model__documents="apart"), H100, 1024, 1, ring=True)
    flops = 4 * 1024 * 4096 * 512
    scores = 2 * 1024 * 4096 * 8
    rates = H100.rates
    assert joined.forward == pytest.approx(flops / (rates.attention * H100.peak))
    by_matmuls = 2 * flops / (rates.matmul * H100.matmul * H100.peak) + rates.scores * scores / H100.bandwidth
    assert apart.forward == pytest.approx(by_matmuls)


def test_a_ring_computes_what_a_window_hides():
    windowed = config_of("context=4", "ring", model__window="1024")
    whole = config_of("context=4", "ring", model__documents="apart")
    assert attention(windowed, H100, 1024, 1, ring=True) == attention(whole, H100, 1024, 1, ring=True)
    assert attention(windowed, H100, 1024, 1).forward < attention(config_of("context=4"), H100, 1024, 1).forward


def test_a_ring_across_hosts_has_the_slower_link():
    inside = predicted(config_of("context=8", "ring"))
    across = predicted(config_of("data=8,context=8", "ring", train__global_batch_size="64"), replace(H100, per_host=4))
    assert across.parts[CONTEXT] > 2 * inside.parts[CONTEXT]
