"""The walk-through of full sharding: what moves, what lies where, and that it is one device's step."""

import json

import jax
import numpy as np
import pytest

from jaxdist.lab import fsdp_walkthrough as lab
from jaxdist.lab.__main__ import main
from jaxdist.lab.phases import Recorder, cpu_mesh
from jaxdist.lab.two_layers import draw
from jaxdist.programs.hlo import collectives
from jaxdist.sharding import Layout
from tests.communication.reading import summary
from tests.lab.pages import assert_pasted

FLOAT = 4
SHARD, ROWS, WHOLE = (1, 4), (3, 4), (4, 4)


@pytest.fixture(scope="module")
def result() -> lab.Result:
    return lab.measure()


def phase(result: lab.Result, name: str, which: int = 0):
    return [one for one in result.phases if one.name == name][which]


def test_what_each_phase_moves(result):
    moved = [(one.name, [move.kind for move in one.moves]) for one in result.phases if one.moves]
    assert moved == [
        ("gather layer 1", ["all-gather"]),
        ("gather layer 2", ["all-gather"]),
        ("loss", ["all-reduce"]),
        ("gather layer 2 again", ["all-gather"]),
        ("reduce gradient 2", ["reduce-scatter"]),
        ("gather layer 1 again", ["all-gather"]),
        ("reduce gradient 1", ["reduce-scatter"]),
    ]
    moves = [move for one in result.phases for move in one.moves]
    assert {(move.axes, move.devices, move.count) for move in moves} == {(("data",), 4, 1)}
    assert {move.elements for move in moves if move.kind != "all-reduce"} == {16}
    parameters, share = 2 * 16, 3 / 4
    assert sum(move.wire for move in moves if move.array_elements) == 3 * parameters * share, "the ZeRO paper's 1.5 x 2"
    assert phase(result, "loss").scalars == 1
    assert result.calls["phases"] == {"all-gather": 4, "reduce-scatter": 2}


def test_the_fused_step_moves_less_and_why(result):
    assert result.calls["fused"] == {"all-gather": 2, "reduce-scatter": 2}
    assert result.gathers == (4, 3, 2)


def test_more_layers_in_a_row_are_merged_too():
    """What docs/tutorials/walkthrough.md says of four layers; tests/communication has the trainer's loop."""
    mesh = cpu_mesh("4x1x1")
    layout = Layout.on(mesh)
    place = lab.sharded(layout)
    with jax.set_mesh(mesh):
        lay = lambda shape, spec: jax.ShapeDtypeStruct(shape, np.float32, sharding=jax.NamedSharding(mesh, spec))
        w, x = lay((4, 4), place.rest), lay((12, 4), layout.activation("BD"))
        lowered = jax.jit(jax.grad(lab.fused(place)[1])).lower([w] * 4, x, x)
    found = summary(collectives(lowered.compile().as_text(), mesh))
    assert lab.gathers_asked(lowered) == 4 + 4 - 1
    assert found["all-gather", ("data",)] == (4, 4 * 16)
    assert found["reduce-scatter", ("data",)] == (4, 4 * 16)


def test_shapes_on_the_devices(result):
    shapes = {"w": SHARD, "g": SHARD, "W": WHOLE, "G": WHOLE, "x": ROWS, "t": ROWS, "h": ROWS, "y": ROWS, "d": ROWS}
    for one in result.phases:
        for array, at in one.alive.items():
            assert at == dict.fromkeys(range(4), () if array == "loss" else shapes[array[0]]), (one.name, array)


def test_live_bytes(result):
    rest = 2 * 4 * FLOAT
    rows, whole = 12 * FLOAT, 16 * FLOAT
    told = {
        ("at rest", 0): rest + 2 * rows,
        ("forward layer 1", 0): rest + 3 * rows + whole,
        ("free layer 1", 0): rest + 3 * rows,
        ("loss", 0): rest + 5 * rows + FLOAT,
        ("reduce gradient 1", 0): 2 * rest + 4 * rows + 2 * whole,
        ("free layer 1", 1): 2 * rest,
        ("free the gradients", 0): rest,
    }
    for (name, which), expected in told.items():
        assert phase(result, name, which).bytes == dict.fromkeys(range(4), expected), name


def test_a_whole_weight_lives_only_while_it_is_used(result):
    whole = [[name for name in one.alive if name in ("W1", "W2")] for one in result.phases]
    runs = [names for i, names in enumerate(whole) if i == 0 or names != whole[i - 1]]
    assert runs == [[], ["W1"], [], ["W2"], [], ["W2"], [], ["W1"], []]


def test_freed_is_freed():
    (device,) = cpu_mesh("1x1x1").devices.flat
    array = jax.device_put(np.ones((64, 64), np.float32), device)
    piece = array.addressable_shards[0].data
    recorder = Recorder([device], {"a": array, "b": jax.device_put(np.ones(4, np.float32), device)}, watched=("b",))
    recorder.free("free", "a")
    assert array.is_deleted()
    assert piece.is_deleted()
    assert [one.bytes[0] for one in recorder.phases] == [64 * 64 * FLOAT + 4 * FLOAT, 4 * FLOAT]


def test_what_is_told_to_be_alive_is_all_that_jax_keeps_alive(monkeypatch):
    """Also while the phase is noted, and with arrays that nobody has named."""
    others = jax.live_arrays()
    before = {id(array) for array in others}
    kept, note = [], Recorder._note

    def spy(recorder, *told):
        note(recorder, *told)
        new = [array for array in jax.live_arrays() if id(array) not in before and not array.is_deleted()]
        pieces = [piece.data for array in new for piece in array.addressable_shards]
        buffers = {(piece.device, piece.unsafe_buffer_pointer()): piece.nbytes for piece in pieces}
        kept.append(sum(buffers.values()))

    monkeypatch.setattr(Recorder, "_note", spy)
    result = lab.measure()
    assert kept == [sum(one.bytes.values()) for one in result.phases]
    assert list(result.phases[-1].alive) == ["w1", "w2"]
    assert not [array.shape for array in jax.live_arrays() if id(array) not in before and not array.is_deleted()]


def test_weights_are_untouched_until_the_backward_pass_has_ended(result):
    names = [one.name for one in result.phases]
    assert [one.initial for one in result.phases] == [i < names.index("update") for i in range(len(names))]
    assert names.index("update") > names.index("reduce gradient 1") > names.index("backward layer 1")
    assert result.untouched


def test_an_early_update_is_seen():
    (device,) = cpu_mesh("1x1x1").devices.flat
    recorder = Recorder([device], {"w": jax.device_put(np.zeros(2, np.float32), device)}, watched=("w",))
    recorder.run("nothing", lambda w: w + 0, ["w"], ["w"])
    recorder.run("the sign of zero", lambda w: -w, ["w"], ["w"])
    assert [one.initial for one in recorder.phases] == [True, True, False]


@pytest.mark.parametrize("early", ["v", "w"])
def test_an_early_update_of_one_weight_of_several_is_seen(early):
    (device,) = cpu_mesh("1x1x1").devices.flat
    arrays = {name: jax.device_put(np.ones(2, np.float32), device) for name in ("v", "w")}
    recorder = Recorder([device], arrays, watched=("v", "w"))
    recorder.run("early", lambda a: 2 * a, [early], [early])
    assert [one.initial for one in recorder.phases] == [True, False]


def test_it_is_the_step_of_one_device(result):
    """Against numpy in float64, by formulas of its own."""
    one = {name: value.astype(np.float64) for name, value in draw().items()}
    h = np.tanh(one["x"] @ one["w1"])
    dy = 2 * (h @ one["w2"] - one["t"]) / one["t"].size
    grads = one["x"].T @ (dy @ one["w2"].T * (1 - h**2)), h.T @ dy
    loss = ((h @ one["w2"] - one["t"]) ** 2).mean()
    by_hand = lab.Outcome(loss, *grads, one["w1"] - 0.1 * grads[0], one["w2"] - 0.1 * grads[1])
    assert max(by_hand.differences(lab.on_one_device(**draw())).values()) < 1e-6
    assert set(result.differences) == {"phases", "fused"}
    assert all(set(of) == set(by_hand._fields) for of in result.differences.values())
    assert lab.largest(result.differences) < 1e-6
    assert min(abs(grad).max() for grad in grads) > 0.1, "gradients so small that any would do"
    assert result.passed


def test_a_number_that_is_none_fails(result):
    wrong = {**result.differences, "fused": {**result.differences["fused"], "weight_1": float("nan")}}
    assert not lab.Result(result.phases, result.calls, result.gathers, wrong).passed


def test_a_collective_too_many_fails(result):
    extra = {**result.calls, "fused": {**result.calls["fused"], "all-reduce": 1}}
    assert not lab.Result(result.phases, extra, result.gathers, result.differences).passed


def test_a_difference_fails_the_command(result, monkeypatch, capsys):
    wrong = {**result.differences, "fused": {**result.differences["fused"], "gradient_1": 2e-6}}
    monkeypatch.setattr(lab, "measure", lambda: lab.Result(result.phases, result.calls, result.gathers, wrong))
    assert main(["fsdp-walkthrough"]) == 1
    assert "NOT AS CLAIMED: the largest difference is 2.0e-06" in capsys.readouterr().out


def test_the_json(result, monkeypatch, capsys):
    monkeypatch.setattr(lab, "measure", lambda: result)
    assert main(["fsdp-walkthrough", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["id"], told["passed"], told["value"]) == ("fsdp-walkthrough", True, told["expected"])
    assert told["weights_untouched_until_update"] is True
    assert told["fused_all_gathers"] == {"with_input_gradient": 4, "lowered": 3, "compiled": 2}
    gather = told["phases"][1]
    assert gather["collectives"] == {"all-gather": 1}
    assert gather["alive"]["w1"] == {"0": [1, 4], "1": [1, 4], "2": [1, 4], "3": [1, 4]}
    assert gather["bytes"] == {"0": 192, "1": 192, "2": 192, "3": 192}
    assert told["largest_difference"] < told["tolerance"] == 1e-6


def test_what_a_person_reads(result):
    lines = result.lines()
    assert_pasted(lines, "tutorials/walkthrough.md")
    assert len(lines) < 60
    assert max(map(len, lines)) <= 120
    assert "4 all-gathers and 2 reduce-scatters" in "\n".join(lines)
    row = next(line for line in lines if line.startswith("backward layer 2"))
    assert " ".join(row.split()) == "backward layer 2 initial 352 w1 w2 x h dy dh W2 G2"
