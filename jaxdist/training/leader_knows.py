"""Let the leader find out what is known of the data, and the other processes hear it: they read none of it again."""

from __future__ import annotations

from collections.abc import Callable

from jaxdist.cluster import kv_store
from jaxdist.cluster.consensus import told_by_leader
from jaxdist.data import known

KNOWN = "what is known of the data"
"""The name under which the leader tells the others what it has found out about files."""


def knowing(read: Callable[[], None]) -> None:
    """Call `read` and, in the leader, tell the others what it has found out; in the others, hear this before.

    It is called once in every process, first in the leader (`leader_first`).
    """
    if kv_store.process() != 0:
        known.hear(told_by_leader(KNOWN, ""))
        read()
        return
    read()
    if kv_store.processes() > 1:
        told_by_leader(KNOWN, known.told())
