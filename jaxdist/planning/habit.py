"""Describe a habit of a compiler: where it does something otherwise than theory says, and since which jax."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from packaging.version import Version

PREDICTED = "0.10"
"""The version of jax that predictions are made for."""

BOTH = ("cpu", "gpu")


@dataclass(frozen=True, kw_only=True)
class Habit:
    """Something that a compiler does on some platforms, since a version of jax."""

    name: str
    reason: str
    platforms: tuple[str, ...] = BOTH
    """The values of `Layout.platform` where it occurs."""
    since: str = PREDICTED
    """The first version of jax where it occurs."""

    def occurs(self, platform: str, jax: str) -> bool:
        """Return whether it occurs on a platform with this version of jax."""
        return platform in self.platforms and _release(jax) >= _release(self.since)


@cache
def _release(version: str) -> tuple[int, ...]:
    return Version(version).release
