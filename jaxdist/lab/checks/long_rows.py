"""Ring attention on zigzag chunks: equal work for all devices, and what it sends (Liu et al. 2023)."""

from __future__ import annotations

from functools import partial

from jaxdist.lab import ring
from jaxdist.lab.checks.pipelines import formula
from jaxdist.lab.claim import Check, Claim, Outcome
from jaxdist.mesh.context import WIDE, ring_bytes, zigzag
from jaxdist.output.tables import table

PARITY = 1e-5
"""How far the result may be from that of attention on one device."""


def balance(claim: Claim, ranks: tuple[int, ...] = (2, 4), order: ring.Order = zigzag) -> Outcome:
    """Count what each device computes at each step.

    No pair of a visitor may be computed in vain, the result must be right, and what is sent as predicted.
    """
    runs = [ring.run(n, order) for n in ranks]
    u = ring.elements()
    value = claim.expected
    as_predicted = True
    rows = [("n", "of a device at a step", "contiguous: time", "forward, u", "backward, u", "difference")]
    for run in runs:
        n = run.ranks
        shares = {ring.work(run, device, step) for device in range(n) for step in range(n)}
        if value == claim.expected and shares != {formula(claim.expected, n=n)}:
            value = f"{min(shares)} to {max(shares)} at n = {n}"
        sent = ring.sent(n)
        as_predicted &= ring.hidden(run) == 0
        as_predicted &= run.difference < PARITY
        as_predicted &= WIDE * (sent.forward + sent.backward) == ring_bytes(u, n, WIDE)
        rows.append(
            (
                str(n),
                " or ".join(map(str, sorted(shares))),
                f"{float(ring.time(n, ring.contiguous) / ring.time(n, zigzag)):.2f} x",
                f"{sent.forward / u:g}",
                f"{sent.backward / u:g}",
                f"{run.difference:.1e}",
            )
        )
    lines = (
        "counted in the kernel of the ring that trains, over n virtual devices:",
        *table(rows),
        "Without zigzag, a device with early tokens waits at each step for one that sees all keys: more time.",
        "Sent, in the program of each pass: in u = 2 S/n K H, the elements of a device's keys and values.",
        "Difference: of the result to attention on one device.",
    )
    return Outcome(value, claim.met(value) and as_predicted, lines, partial(ring.picture, done=runs[-1]))


CHECKS = {"cp-ring": Check(balance, {"order": ring.contiguous})}
