"""Measure what the lecture says of slow networks: servers, local steps, compressed gradients, late gradients."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import partial

import numpy as np

from jaxdist.lab import two_layers
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.lab.reductions.checks import gradient_bytes
from jaxdist.lab.slow_networks import byte_model, compressed, picture, replicas, server, timeline, top_k
from jaxdist.output.tables import table
from jaxdist.parallel.crossing.codes import BLOCK, LARGEST_OF, SCALE

WORKERS = (2, 6)
"""Numbers of workers of a parameter server, K; they divide the rows."""

REPLICAS = 4
ROWS = 16
"""Rows of a replica in a step."""

SUMMED = (256, 256)
"""Shape of a gradient of whole blocks, which no padding makes longer."""


def _apart(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the norm of the difference, relative to the norm of `wanted`."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def server_equal(claim: Claim, missing: int = 0) -> Outcome:
    """Measure how far the model of a parameter server is from one device's, after a step on the same rows.

    `missing`: the number of workers, the last ones, for which the server does not wait.
    """
    wanted = server.one_device()
    apart = {K: _apart(server.run(K, waits_for=K - missing).weights, wanted) for K in WORKERS}
    value = max(apart.values())
    rows = [("workers K", "rows of each", "model from one device's")]
    for K, difference in apart.items():
        rows.append((str(K), str(two_layers.ROWS // K), f"{difference:.1e}"))
    change = _apart(server.initial(), wanted)
    return Outcome(value, claim.met(value), (*table(rows), f"the step changes it by {change:.1e}"))


def server_direction(claim: Claim, push: server.Push = "gradients") -> Outcome:
    """Read from the compiled program, and from the numbers in each message, what goes into and out of the master."""
    steps = [server.run(K, push) for K in WORKERS]
    # The counts in terms of K: the same text for each number of workers.
    values = [_flows(step, step.workers) for step in steps]
    value = values[0]
    if len(set(values)) > 1:
        value = "; ".join(f"{one} at K = {step.workers}" for step, one in zip(steps, values, strict=True))
    last = steps[-1]
    rows = [(f"K = {last.workers}", "bytes in", "bytes out", "what")]
    for name, node in (("master", last.workers), ("a worker", 0)):
        sizes = [str(sum(one.bytes for one in last.carried(node, into))) for into in (True, False)]
        rows.append((name, *sizes, _flows(last, node)))
    return Outcome(value, claim.met(value), tuple(table(rows)))


def _flows(step: server.ServerStep, node: int) -> str:
    """Return what goes into and out of a node: `K gradients in, K models out`."""
    return f"{_carried(step, node, True)} in, {_carried(step, node, False)} out"


def _carried(step: server.ServerStep, node: int, into: bool) -> str:
    kinds = [one.what for one in step.carried(node, into)]
    parts = []
    for what in sorted(set(kinds)):
        count = kinds.count(what)
        number = "K" if count == step.workers else str(count)
        parts.append(f"{number} {what}{'' if count == 1 else 's'}")
    return " and ".join(parts) or "nothing"


def federated(claim: Claim, local_steps: int = 1, rate: float = 0.5, others: tuple[int, ...] = (5, 30)) -> Outcome:
    """Measure how far averaged models are from SGD of one device on the rows of all, after 60 steps.

    `local_steps` are made between averages, `others` are numbers of them to show. Each replica has a text of its own,
    as remote or private data are.
    """
    batches = byte_model.batches(60, REPLICAS, ROWS, private=True)
    alone = byte_model.descend(rate, batches.reshape(len(batches), -1, batches.shape[-1]))
    (synchronous,) = replicas.train("on time", [rate], batches)
    trained = {H: _local(H, rate, batches) for H in (local_steps, *others)}
    value = _apart(trained[local_steps].mean, alone)
    rows = [("local steps H", "crossings", "sent per step", "held-out loss", "from one device")]
    rows.append(("one device", "0", "0 B", f"{byte_model.validation_loss(alone):.4f}", ""))
    for name, one in {"synchronous": synchronous, **{str(H): of for H, of in trained.items()}}.items():
        loss = byte_model.validation_loss(one.mean)
        sent = f"{one.bytes / len(batches):,.0f} B"
        rows.append((name, str(one.crossed), sent, f"{loss:.4f}", f"{_apart(one.mean, alone):.1e}"))
    lines = (f"{REPLICAS} replicas, each with its own text; {len(batches)} steps of SGD at {rate}:", *table(rows))
    drawn = partial(picture.averaging, synchronous, trained)
    return Outcome(value, claim.met(value), lines, drawn)


def _local(H: int, rate: float, batches: np.ndarray) -> replicas.Trained:
    """Train with H local steps between averages."""
    return replicas.local_steps([H] * REPLICAS, rate, batches.reshape(-1, H, *batches.shape[1:]))


def straggler(claim: Claim, local_steps: int = 8, slow_steps: int = 4) -> Outcome:
    """Measure the time of steps with one worker at half speed, relative to that with none, in a model of time.

    Synchronous, then with `local_steps` between averages, of which the slow worker makes `slow_steps`. The shares of
    idle time and a real training, both ways in the same time, stand beside it.
    """
    rounds = 6
    fast = [Fraction(1)] * REPLICAS
    one_slow = [*fast[1:], Fraction(2)]
    even = [local_steps] * REPLICAS
    fewer = [*even[1:], slow_steps]
    ones = [1] * REPLICAS
    steps = rounds * local_steps
    all_fast = timeline.simulate(fast, ones, steps)
    waiting = timeline.simulate(one_slow, ones, steps)
    adapted = timeline.simulate(one_slow, fewer, rounds)
    ratios = (waiting.time / all_fast.time, adapted.time / all_fast.time)
    value = " and ".join(f"{float(ratio):.1f}" for ratio in ratios)
    exact = value == " and ".join(f"{float(ratio)}" for ratio in ratios)
    # In the time of all steps with local steps, synchronous steps get only so far.
    reached = int(steps / ratios[0])
    batches = byte_model.batches(steps, REPLICAS, ROWS, private=False)
    (synchronous,) = replicas.train("on time", [0.5], batches[:reached])
    local = replicas.local_steps(fewer, 0.5, batches.reshape(rounds, local_steps, *batches.shape[1:]))
    rows = [("one worker of 4 at half speed", "time", "idle", "batches read", "held-out loss at time 48")]
    for name, of, read, trained in (
        ("synchronous", waiting, reached * REPLICAS, synchronous),
        (f"{local_steps} local steps, {slow_steps} of the slow one", adapted, rounds * sum(fewer), local),
    ):
        loss = byte_model.validation_loss(trained.mean)
        rows.append((name, f"{float(of.time):g}", f"{float(of.idle):.1%}", str(read), f"{loss:.4f}"))
    lines = (
        f"{steps} steps of a fast worker, time in its steps; {float(all_fast.time):g} if all are fast",
        *table(rows),
    )
    return Outcome(value, claim.met(value) and exact, lines, picture.timelines)


def top_k_only(claim: Claim, density: float = 0.01, feedback: bool = True, steps: int = 40) -> Outcome:
    """Measure the bytes that come in for each element of a tensor, and whether the rest arrives later or still waits.

    The tensor is the output matrix of a model that learns on two replicas. Bytes are read from the compiled program,
    for places of 16 bits, then of 32.
    """
    batches = byte_model.batches(steps, 2, ROWS, private=False)
    (trained,) = replicas.train("on time", [0.5], batches, watched=byte_model.part("out"))
    gradients = trained.gradients
    total = gradients.mean(axis=1, dtype=np.float64).sum(axis=0)
    rows = [("place", "bytes in per element", "arrived", "waits", "lost")]
    crossed = {}
    lost = []
    for bits in top_k.FORMS:
        one = top_k.cross(gradients, density, bits, feedback)
        arrived = one.arrived.sum(axis=0, dtype=np.float64)
        waits = one.waiting[-1].mean(axis=0, dtype=np.float64)
        lost.append(_apart(arrived + waits, total))
        size = np.linalg.norm(total)
        shares = [f"{np.linalg.norm(part) / size:.1%}" for part in (arrived, waits)]
        rows.append((f"{bits} bits", f"{one.bytes_in:g}", *shares, f"{lost[-1]:.1e}"))
        crossed[bits] = one
    value = " to ".join(f"{one.bytes_in:g}" for one in crossed.values())
    # The table asks for error feedback: what is not sent has to wait.
    if not max(lost) <= 1e-6:
        value += f", but {max(lost):.0%} of the sum is lost"
    lines = (
        f"{steps} gradients of {gradients.shape[-1]:,} elements on 2 replicas, norms relative to that of the sum:",
    )
    return Outcome(value, claim.met(value), (*lines, *table(rows)), partial(picture.feedback, gradients, density))


def top_k_int8(claim: Claim, density: float = 0.01) -> Outcome:
    """Measure the bytes that one of two replicas sends for each element of a gradient, by the trainer's own rule.

    They are read from the compiled program. The claim counts places of 32 bits and no scales, the trainer sends places
    of 16 bits and scales: both sums have to be as expected. The program is run, too: the largest arrive exactly, and
    what arrives and what each replica keeps are the whole sum.
    """
    gradients = np.random.default_rng(0).standard_t(3, (2, *SUMMED)).astype(np.float32)
    exact = compressed.once(gradients, "exact")
    found = compressed.once(gradients, "topk-int8", density)
    int8 = found.bytes_of("s8") * BLOCK / (BLOCK + SCALE)
    scales = found.bytes_of("s8") - int8
    # What the lab's own rule gathers, with places of 32 bits.
    wide = top_k.cross(gradients.reshape(1, 2, -1), density, bits=32).bytes_in
    as_claimed = wide + int8
    total = gradients.sum(axis=0, dtype=np.float64)
    lost = _apart(found.total + found.errors.sum(axis=0, dtype=np.float64), total)
    rounded = _rounded_largest(gradients, found, density)
    rows = [("bytes per element", "largest", "INT8", "scales", "in all", "float32 / it")]
    for name, parts in (
        ("the trainer: places of 16 bits", (found.bytes_of("u16"), int8, scales)),
        ("as claimed: places of 32 bits, no scales", (wide, int8, 0.0)),
        ("places of 32 bits, and scales", (wide, int8, scales)),
    ):
        cells = [f"{part:.4f}" for part in (*parts, sum(parts))]
        rows.append((name, *cells, f"{exact.bytes / sum(parts):.2f}"))
    lines = (
        f"{total.size:,} elements, 2 replicas, of which each sends {exact.bytes:g} bytes per element in float32",
        *table(rows),
        "The trainer's shorter places and its scales nearly cancel: "
        f"{found.bytes_of('u16') - wide:+.3f} and {scales:+.3f} bytes.",
        f"lost of the sum: {lost:.1e}; rounded of the largest, apart from the residual of the sum: {rounded}",
    )
    near = all(claim.met(bytes) for bytes in (found.bytes, as_claimed))
    return Outcome(found.bytes, near and rounded == 0 and lost <= 1e-6, lines)


def _rounded_largest(gradients: np.ndarray, summed: compressed.Summed, density: float) -> int:
    """Count the largest elements of each block that did not arrive exactly."""
    count = round(density * LARGEST_OF)
    rounded = 0
    for replica, (own, errors) in enumerate(zip(gradients, summed.errors, strict=True)):
        largest = np.argsort(-np.abs(own.reshape(-1, LARGEST_OF)), axis=1)[:, :count]
        at_largest = np.take_along_axis(errors.reshape(-1, LARGEST_OF), largest, axis=1)
        pieces = at_largest.reshape(len(gradients), -1)
        # In the piece that a replica has summed, its error is also that of the sum, on its way back.
        rounded += np.count_nonzero(np.delete(pieces, replica, axis=0))
    return rounded


def top_k_int8_loss(
    claim: Claim, rule: str = "topk-int8", others: Sequence[str] = ("bfloat16", "int8", "powersgd"), steps: int = 100
) -> Outcome:
    """Measure the held-out loss after training with gradients summed by a rule, minus that with exact sums.

    Two replicas, SGD, error feedback; the other rules are shown beside it.
    """
    batches = byte_model.batches(steps, 2, ROWS, private=False)
    trained = {name: compressed.train(name, 0.5, batches) for name in dict.fromkeys(("exact", rule, *others))}
    losses = {name: byte_model.validation_loss(one.mean) for name, one in trained.items()}
    sent = {name: one.bytes / steps / byte_model.start().size for name, one in trained.items()}
    value = losses[rule] - losses["exact"]
    rows = [("rule", "bytes per element", "held-out loss", "gap", "of the loss")]
    for name, loss in losses.items():
        gap = loss - losses["exact"]
        rows.append((name, f"{sent[name]:.3f}", f"{loss:.4f}", f"{gap:+.4f}", f"{gap / losses['exact']:+.2%}"))
    unigram = byte_model.unigram_loss()
    lines = (
        f"2 replicas, {steps} steps of SGD at 0.5 with error feedback; nats per byte:",
        *table(rows),
        f"how often each byte occurs, alone: {unigram:.4f}",
    )
    # An agreement of models that have learned nothing would say nothing.
    passed = claim.met(value, of=losses["exact"]) and losses["exact"] < unigram
    return Outcome(value, passed, lines, partial(picture.bytes_and_loss, trained))


def dgc_ratio(claim: Claim, whole: float = 97, sent: float = 0.35) -> Outcome:
    """Divide the published sizes of a gradient of ResNet-50, in MB: arithmetic, nothing is measured."""
    value = whole / sent
    own = gradient_bytes()
    places = own * 0.001 * 2 / 2**20
    lines = (
        f"{whole:g} MB / {sent:g} MB, both published (Lin et al. 2018): this is arithmetic, and no training was run",
        f"the first checks: a gradient of jaxdist's ResNet-50 has {own:,} bytes, {own / 2**20:.1f} MiB in float32",
        f"0.1 % of its elements, each with a place of 32 bits, would be {places:.2f} MiB",
    )
    return Outcome(value, claim.met(value), lines)


def delay(
    claim: Claim, rule: str = "delayed averaging", rates: Sequence[float] = (0.1, 0.5), steps: int = 300
) -> Outcome:
    """Measure the held-out loss with gradients that cross one step late, minus that with gradients on time.

    By delayed gradient averaging with SGD, at each rate; the value is the larger gap. A late mean without the rule's
    correction is shown beside it.
    """
    batches = byte_model.batches(steps, REPLICAS, ROWS, private=True)
    rules = dict.fromkeys(("on time", rule, "stale"))
    trained = {name: replicas.train(name, rates, batches) for name in rules}
    losses = {name: [byte_model.validation_loss(one.mean) for one in of] for name, of in trained.items()}
    gaps = [late - timely for late, timely in zip(losses[rule], losses["on time"], strict=True)]
    held = [claim.met(gap, of=loss) for gap, loss in zip(gaps, losses["on time"], strict=True)]
    value = max(gaps, key=abs)
    rows = [("rate", "on time", rule, "gap", "of the loss", "weights apart", "stale alone")]
    for at, rate in enumerate(rates):
        loss = losses["on time"][at]
        share = f"{gaps[at] / loss:.2%}"
        apart = f"{trained[rule][at].spread:.1e}"
        cells = (f"{rate:g}", f"{loss:.4f}", f"{losses[rule][at]:.4f}", f"{gaps[at]:.4f}", share, apart)
        rows.append((*cells, f"{losses['stale'][at]:.4f}"))
    unigram = byte_model.unigram_loss()
    # An agreement of models that have learned nothing would say nothing.
    learned = all(loss < unigram for loss in losses["on time"])
    lines = (
        f"{REPLICAS} replicas, each with its own text; {steps} steps of SGD, gradients one step late; held-out nats:",
        *table(rows),
        f"how often each byte occurs, alone: {unigram:.4f}",
    )
    return Outcome(value, all(held) and learned, lines, partial(picture.late, trained, rates))


CHECKS = {
    "ps-equal": Check(server_equal, {"missing": 1}),
    "ps-direction": Check(server_direction, {"push": "models"}),
    "federated-average": Check(federated, {"local_steps": 4}),
    "straggler": Check(straggler, {"slow_steps": 8}),
    "topk-int8": Check(top_k_int8, {"density": 0.02}),
    "topk-int8-loss": Check(top_k_int8_loss, {}),
    "topk-only": Check(top_k_only, {"feedback": False}),
    # 0.1 % of 97.5 MB, without the places.
    "dgc-ratio": Check(dgc_ratio, {"sent": 0.0975}),
    "dga-delay": Check(delay, {"rule": "stale"}),
}
"""Claim -> check. The controls: a server that does not wait for all, workers that push models, several local steps, a
slow worker that makes as many steps, a rest that is forgotten, and a late mean that nothing corrects."""
