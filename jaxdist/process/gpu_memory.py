"""The fraction of a GPU's memory that JAX may allocate, from the environment or jaxdist's default. No jax here.

A module of its own because the planner, which must not import `cluster`, predicts with the fraction that `cluster`
sets.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from jaxdist.config import RequestError

GPU_SHARE = 0.92
"""Fraction of a GPU's memory that JAX allocates in jaxdist's commands unless the environment says otherwise. The rest
is left to CUDA's context, its libraries and NCCL's buffers."""

JAX_DEFAULT_SHARE = 0.75
"""Fraction that JAX allocates without any setting."""

FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables that set the fraction: the new name and the old one."""


def gpu_share() -> float:
    """Return the fraction of a GPU's memory that JAX may allocate in a jaxdist command with this environment.

    Raises `RequestError` if the environment sets it to something that is not a positive number.
    """
    text = next((os.environ[name] for name in FRACTIONS if os.environ.get(name)), "")
    if not text:
        return GPU_SHARE if preallocates() else JAX_DEFAULT_SHARE
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share < math.inf:
        names = " or ".join(FRACTIONS)
        raise RequestError(f"{names} is '{text[:40]}' in the environment; it must be a number above 0, such as 0.9")
    return share


def preallocates(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether JAX allocates its fraction up front. If it does not, jaxdist leaves the limit to JAX too."""
    return environment.get("XLA_PYTHON_CLIENT_PREALLOCATE", "") not in ("0", "false", "False")
