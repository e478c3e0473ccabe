"""Messages read from compiled programs: who waits for whom, what is counted, and how long it takes."""

import jax
import pytest

from jaxdist.lab.reductions.messages import Message, Traffic, messages
from jaxdist.mesh import AXES, abstract_mesh

MESH = abstract_mesh({**dict.fromkeys(AXES, 1), "data": 4})


def program(*lines: str) -> str:
    """Of four devices, with an array of 2 numbers each."""
    head = "HloModule jit_f, is_scheduled=true, num_partitions=4\n\nENTRY %main (x: f32[2]) -> f32[2] {\n"
    return head + "".join(f"  {line}\n" for line in ("%x = f32[2]{0} parameter(0)", *lines)) + "}\n"


def permute(name: str, operand: str, pairs: str, more: str = "") -> str:
    return f"%{name} = f32[2]{{0}} collective-permute(%{operand}), channel_id=1, source_target_pairs={{{pairs}}}{more}"


def told(*lines: str) -> list[tuple[int, int, int]]:
    return [(m.source, m.target, m.round) for m in messages(program(*lines), MESH).messages]


def test_a_message_waits_for_what_it_is_made_of():
    chain = permute("a", "x", "{0,1}"), permute("b", "a", "{1,2}"), "%y = f32[2]{0} add(%b, %x)"
    assert told(*chain, permute("c", "y", "{2,3}")) == [(0, 1, 1), (1, 2, 2), (2, 3, 3)]


def test_messages_of_the_same_array_leave_in_the_same_round():
    assert told(permute("a", "x", "{0,1}"), permute("b", "x", "{1,0}"), permute("c", "x", "{1,2}")) == [
        (0, 1, 1),
        (1, 0, 1),
        (1, 2, 1),
    ]


def test_what_other_nodes_do_with_an_instruction_does_not_hold_a_message_up():
    """Node 3 has received nothing, and node 2 nothing by `a`: the array is what it was there."""
    assert told(permute("a", "x", "{0,1}"), permute("b", "a", "{1,0},{3,2}")) == [(0, 1, 1), (1, 0, 2), (3, 2, 1)]
    three = permute("a", "x", "{0,1}"), permute("b", "a", "{1,2}"), permute("c", "b", "{1,3}")
    assert told(*three)[-1] == (1, 3, 1), "b brings nothing to node 1, though a did"


def test_an_order_of_instructions_alone_is_no_dependence():
    later = permute("b", "x", "{1,2}", ", control-predecessors={%a}")
    assert told(permute("a", "x", "{0,1}"), later) == [(0, 1, 1), (1, 2, 1)]


def test_counts():
    """Two messages into node 0 in one round, one in the next: 8 bytes each."""
    lines = permute("a", "x", "{1,0}"), permute("b", "x", "{2,0}"), "%y = f32[2]{0} add(%a, %b)"
    found = messages(program(*lines, permute("c", "y", "{0,3}"), permute("d", "c", "{3,0}")), MESH)
    assert (found.rounds, found.peak, found.bytes) == (3, 2, 32)
    assert found.sent == {0: 8, 1: 8, 2: 8, 3: 8}
    assert found.received == {0: 24, 3: 8}
    assert [message.after for message in found.messages] == [(), (), (0, 1), (2,)]


@pytest.mark.parametrize(
    "line",
    [
        "%y = f32[2]{0} all-reduce(%x), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%sum",
        "%y = (f32[2]{0}) send(%x), channel_id=2",
    ],
)
def test_what_is_no_message_is_not_left_out(line):
    with pytest.raises(ValueError, match=r"all-reduce|send"):
        messages(program(permute("a", "x", "{0,1}"), line), MESH)


def test_a_message_in_a_loop_is_not_left_out():
    """Compiled by XLA: its messages would have to be counted once for each turn."""
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    turn = lambda i, x: jax.lax.ppermute(x, "data", [(k, (k + 1) % 4) for k in range(4)])
    loop = jax.shard_map(lambda x: jax.lax.fori_loop(0, 3, turn, x), mesh=mesh, in_specs=spec, out_specs=spec)
    compiled = jax.jit(loop).lower(jax.ShapeDtypeStruct((4,), "float32")).compile()
    with pytest.raises(ValueError, match="0 collective-permutes can be read as messages, but the program runs 3 x"):
        messages(compiled.as_text(), mesh)


def test_seconds():
    """Latencies of messages that leave together pass together; bytes go one message after the other, at both ends."""
    alpha, beta = 100.0, 1.0
    message = lambda source, target, *after: Message(source, target, 8, after, 1, "")
    seconds = lambda *sent: Traffic(sent).seconds(alpha, beta)
    assert seconds(message(0, 1)) == 108
    assert seconds(message(0, 1), message(2, 3)) == 108
    assert seconds(message(0, 1), message(0, 2)) == 116
    assert seconds(message(1, 0), message(2, 0)) == 116
    assert seconds(message(0, 1), message(1, 0)) == 108, "both ways at once"
    assert seconds(message(0, 1), message(1, 2, 0)) == 216
