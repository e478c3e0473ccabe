"""One digest of files with weights, by which those beside which adapters were trained are known again."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import xxhash

from jaxdist.cluster.consensus import agreed


def digest_of(checksums: Callable[[], Mapping[str, str]]) -> str:
    """Return one digest of files, from their names and checksums. All processes call this, the leader reads them."""

    def combined() -> int:
        text = "\n".join(f"{name} {value}" for name, value in sorted(checksums().items()))
        return xxhash.xxh3_64(text.encode()).intdigest()

    return f"{agreed(combined):016x}"
