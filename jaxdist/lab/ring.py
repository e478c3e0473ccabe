"""Run ring attention on virtual devices, write down what each device computes at each step, and draw it.

The ring is the one that trains (`parallel.context.Ring`). Its kernel is wrapped in one that notes the positions of the
queries and keys that it gets. They are read from the queries and keys themselves, so an order of the row that the ring
does not expect shows too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Int

from jaxdist.lab.phases import cpu_mesh
from jaxdist.lab.pictures import DPI
from jaxdist.mesh import CONTEXT
from jaxdist.mesh.context import zigzag
from jaxdist.models.ring_blocks import QueryBlocks
from jaxdist.models.scores import Scores
from jaxdist.output.pictures import BLUE, GREEN, GREY, INDIGO, ORANGE, PALE, PINK, RED, SKY, TEAL, blank, write_picture
from jaxdist.parallel.context import Attended, Gradients, Keys, Queries, Ring
from jaxdist.programs.hlo import collectives
from jaxdist.sharding import Layout

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CHUNK = 4
"""Tokens of each of the 2 n chunks."""

UNIT = 1 / 64
"""What a position counts in the first number of a query, key or value: little, so that scores stay small."""

ROW = ("S", "BSNH", "BSKH", "BSKH")
"""The dims of positions, queries, keys and values."""

HEADS = 4
KEY_VALUE_HEADS = 2
HEAD_SIZE = 8

COLOURS = (BLUE, ORANGE, GREEN, PINK, RED, SKY, TEAL, INDIGO)
"""A device has one colour."""

Row = tuple[Float[np.ndarray, "B S N H"], Float[np.ndarray, "B S K H"], Float[np.ndarray, "B S K H"]]
"""Queries, keys and values of a whole row."""

Order = Callable[[Int[np.ndarray, " S"], int, int], Int[np.ndarray, " S"]]
"""The position in its row of the token at an index, as `context.zigzag` gives it."""


def contiguous(index: Int[np.ndarray, " S"], sequence: int, ranks: int) -> Int[np.ndarray, " S"]:
    """Give each device one part of the row: the order without zigzag."""
    return index


class Block(NamedTuple):
    """One call of the kernel."""

    device: int
    own: bool
    """Whether the keys are the device's own, the later of which are masked."""
    queries: Int[np.ndarray, " S"]
    """Positions in the row."""
    keys: Int[np.ndarray, " T"]


@dataclass(frozen=True)
class Noted:
    """A kernel of ring attention (`parallel.context.Blocks`) that calls `note` for each block that it computes."""

    note: Callable[[Block], None]
    kernel: QueryBlocks

    def own(self, queries: Queries, keys: Keys) -> Attended:
        """See `Blocks`."""
        self._note(queries, keys, own=True)
        return self.kernel.own(queries, keys)

    def visit(self, queries: Queries, keys: Keys) -> Attended:
        """See `Blocks`."""
        self._note(queries, keys, own=False)
        return self.kernel.visit(queries, keys)

    def own_gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N H"]) -> Gradients:
        """See `Blocks`."""
        return self.kernel.own_gradients(queries, keys, found, g)

    def visit_gradients(self, queries: Queries, keys: Keys, found: Attended, g: Float[Array, "B S N H"]) -> Gradients:
        """See `Blocks`."""
        return self.kernel.visit_gradients(queries, keys, found, g)

    def _note(self, queries: Queries, keys: Keys, own: bool) -> None:
        def note(device: jax.Array, q: jax.Array, k: jax.Array) -> None:
            self.note(Block(int(device), own, _positions(q), _positions(k)))

        jax.debug.callback(note, lax.axis_index(CONTEXT), queries.q, keys.k)


class Run(NamedTuple):
    """What `ranks` devices did."""

    ranks: int
    order: Order
    blocks: tuple[Block, ...]
    difference: float
    """Of the result to attention on one device: the largest, over the largest element."""

    def at(self, device: int, step: int) -> list[Block]:
        """Return what a device computed with the keys that came to it at a step; at step 0, with its own."""
        here = held(self.ranks, self.order, (device - step) % self.ranks)
        return [one for one in self.blocks if one.device == device and np.isin(one.keys, here).all()]


def length(ranks: int) -> int:
    """Return the tokens of the row."""
    return 2 * ranks * CHUNK


def held(ranks: int, order: Order, device: int) -> Int[np.ndarray, " S"]:
    """Return the positions of the tokens of a device."""
    index = np.arange(2 * CHUNK) + device * 2 * CHUNK
    return order(index, length(ranks), ranks)


def elements() -> int:
    """Return u, the elements of a device's keys and values."""
    return 2 * (2 * CHUNK) * KEY_VALUE_HEADS * HEAD_SIZE


def seen(queries: Int[np.ndarray, " S"], keys: Int[np.ndarray, " T"]) -> Fraction:
    """Count the pairs of a query and a key that it sees; a query with itself is half a pair.

    So all pairs of a row of S tokens are S^2 / 2.
    """
    earlier = np.count_nonzero(keys[None] < queries[:, None])
    same = np.count_nonzero(keys[None] == queries[:, None])
    return earlier + Fraction(same, 2)


def hidden(run: Run) -> Fraction:
    """Count the pairs with keys of other devices that were computed although the query does not see the key."""
    visits = [one for one in run.blocks if not one.own]
    return sum((len(one.queries) * len(one.keys) - seen(one.queries, one.keys) for one in visits), Fraction())


def work(run: Run, device: int, step: int) -> Fraction:
    """Return the share of the square of scores that a device computed at a step."""
    pairs = sum(seen(one.queries, one.keys) for one in run.at(device, step))
    return Fraction(pairs, length(run.ranks) ** 2)


def needed(ranks: int, order: Order, device: int, step: int) -> Fraction:
    """Return the share of the square that a device has to compute at a step, with the row in any order."""
    queries = held(ranks, order, device)
    keys = held(ranks, order, (device - step) % ranks)
    return Fraction(seen(queries, keys), length(ranks) ** 2)


def time(ranks: int, order: Order) -> Fraction:
    """Return the shares of the square that the busiest device of each step has to compute, added up."""
    busiest = [max(needed(ranks, order, device, step) for device in range(ranks)) for step in range(ranks)]
    return sum(busiest, Fraction())


def run(ranks: int, order: Order = zigzag) -> Run:
    """Attend over a random row, and compare the result with attention on one device."""
    noted: list[Block] = []
    ring = Ring(ranks, Noted(noted.append, QueryBlocks(Scores.of(HEAD_SIZE))))
    mesh = cpu_mesh(f"{CONTEXT}={ranks}")
    layout = Layout.on(mesh)
    row = _row(ranks)
    place = order(np.arange(length(ranks)), length(ranks), ranks)
    with jax.set_mesh(mesh):
        found = jax.jit(_forward(layout, ring))(*_split(layout, mesh, place, row))
        jax.effects_barrier()
    whole = np.asarray(jax.nn.dot_product_attention(*row, is_causal=True, implementation="xla"))
    wrong = np.abs(np.asarray(found.out) - whole[:, place]).max() / np.abs(whole).max()
    return Run(ranks, order, tuple(noted), float(wrong))


class Sent(NamedTuple):
    """Elements that a device sends over `context` for a layer."""

    forward: float
    backward: float


@cache
def sent(ranks: int) -> Sent:
    """Compile each pass by itself, and count what it sends.

    In one program XLA would send keys and values only once, because nothing lies between the passes here.
    """
    ring = Ring(ranks, QueryBlocks(Scores.of(HEAD_SIZE)))
    mesh = cpu_mesh(f"{CONTEXT}={ranks}")
    layout = Layout.on(mesh)
    place = zigzag(np.arange(length(ranks)), length(ranks), ranks)
    arrays = _split(layout, mesh, place, _row(ranks))
    with jax.set_mesh(mesh):
        forward = jax.jit(_forward(layout, ring)).lower(*arrays)
        found = jax.eval_shape(_forward(layout, ring), *arrays)
        backward = jax.jit(_backward(layout, ring)).lower(*arrays, found, found.out)
    counted = [sum(one.wire for one in collectives(each.compile().as_text(), mesh)) for each in (forward, backward)]
    return Sent(*counted)


def _forward(layout: Layout, ring: Ring) -> Callable[..., Attended]:
    """Return ring attention as a function of positions, queries, keys and values of the whole row."""

    def local(at: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> Attended:
        return ring.attend(Queries(q, at, None), Keys(k, v, at))

    specs = tuple(map(layout.activation, ROW))
    return jax.shard_map(local, in_specs=specs, out_specs=_found(layout))


def _backward(layout: Layout, ring: Ring) -> Callable[..., Gradients]:
    """Return the backward pass as a function of the same, of what was found and of the gradient of the result."""

    def local(at: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, found: Attended, g: jax.Array) -> Gradients:
        return ring.gradients(Queries(q, at, None), Keys(k, v, at), found, g)

    at, q, k, v = map(layout.activation, ROW)
    return jax.shard_map(local, in_specs=(at, q, k, v, _found(layout), q), out_specs=Gradients(q, k, v))


def _found(layout: Layout) -> Attended:
    """Return how the result lies on the devices."""
    return Attended(layout.activation("BSNH"), layout.activation("BSN"))


def _split(layout: Layout, mesh: jax.sharding.Mesh, place: Int[np.ndarray, " S"], row: Row) -> list[jax.Array]:
    """Split positions, and queries, keys and values in their order, over the devices."""
    whole = (place.astype(np.int32), *(a[:, place] for a in row))
    return [jax.device_put(a, NamedSharding(mesh, layout.activation(dims))) for a, dims in zip(whole, ROW, strict=True)]


def _row(ranks: int) -> Row:
    """Return queries, keys and values in the order of the row; the first number of each is its position, in `UNIT`."""
    random = np.random.default_rng(0)
    tokens = length(ranks)
    arrays = []
    for heads in (HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS):
        array = random.standard_normal((1, tokens, heads, HEAD_SIZE)).astype(np.float32)
        array[:, :, :, 0] = UNIT * np.arange(tokens)[:, None]
        arrays.append(array)
    return arrays[0], arrays[1], arrays[2]


def _positions(a: Float[Array, "B S N H"]) -> Int[np.ndarray, " S"]:
    """Return the positions that `_row` has written into queries or keys."""
    return np.rint(np.asarray(a)[0, :, 0, 0] / UNIT).astype(int)


def picture(path: Path, done: Run) -> None:
    """Draw the square of scores at each step of each device, and how long the steps are in both orders of the row."""
    ranks = done.ranks
    figure = blank(1.8 * ranks + 6, 1.8 * ranks + 0.6)
    left, right = figure.subfigures(1, 2, width_ratios=(1.8 * ranks + 1, 5))
    panels = left.subplots(ranks, ranks)
    for device in range(ranks):
        panels[device, 0].set_ylabel(f"device {device}\nchunks {device}, {2 * ranks - 1 - device}")
        for step in range(ranks):
            _square(panels[device, step], done, device, step)
    for step in range(ranks):
        panels[0, step].set_title(f"step {step}", color=RED)
    left.suptitle(
        "scores that are computed: queries downwards, keys to the right,\n"
        "coloured by their device; A, B: halves of a visitor's block",
        fontsize=10,
    )
    top, bottom = right.subplots(2, 1)
    _steps(top, ranks, zigzag, "zigzag")
    _steps(bottom, ranks, contiguous, "contiguous")
    write_picture(path, figure, dpi=DPI)


def _square(axes: Axes, done: Run, device: int, step: int) -> None:
    """Colour the pairs of chunks that were computed, and write A and B into the half-blocks of a visitor."""
    ranks = done.ranks
    source = (device - step) % ranks
    axes.fill((0, 0, 2 * ranks), (0, 2 * ranks, 2 * ranks), color=PALE)
    for block in done.at(device, step):
        for query in np.unique(block.queries // CHUNK):
            for key in np.unique(block.keys // CHUNK):
                _pair(axes, query, key, COLOURS[source])
                if not block.own:
                    letter = "A" if query >= ranks > key else "B"
                    axes.text(key + 0.5, query + 0.5, letter, ha="center", va="center")
    axes.set(xlim=(0, 2 * ranks), ylim=(2 * ranks, 0), aspect="equal", xticks=[], yticks=[])
    axes.set_xlabel(f"keys of device {source}", color=COLOURS[source])


def _pair(axes: Axes, query: int, key: int, colour: str) -> None:
    """Fill the scores of a chunk of queries with a chunk of keys that are not later."""
    if key < query:
        axes.fill((key, key + 1, key + 1, key), (query, query, query + 1, query + 1), color=colour)
    if key == query:
        axes.fill((key, key, key + 1), (query, query + 1, query + 1), color=colour)


def _steps(axes: Axes, ranks: int, order: Order, name: str) -> None:
    """Draw a bar for each device and step; a step ends when its busiest device has ended."""
    unit = needed(ranks, zigzag, 0, 0)
    start = 0.0
    for step in range(ranks):
        lengths = [float(needed(ranks, order, device, step) / unit) for device in range(ranks)]
        for device, share in enumerate(lengths):
            axes.barh(device, share, left=start, color=COLOURS[(device - step) % ranks], edgecolor="white")
        start += max(lengths)
        axes.axvline(start, color=GREY, linestyle=":")
    axes.set(
        yticks=range(ranks),
        ylim=(ranks - 0.5, -0.5),
        xlim=(0, 2 * ranks),
        xlabel="time, in that of two half-blocks of scores",
    )
    axes.set_yticklabels([f"device {device}" for device in range(ranks)])
    axes.set_title(f"{name}: {ranks} steps end after {start:.0f}")
