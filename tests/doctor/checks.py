"""A check, made here."""

from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.config import Config
from jaxdist.doctor.findings import OK, UNCHECKED, Here

TWO = ProcessEnv(2, 1, "10.9.8.7:1234")


def here(place=None) -> Here:
    return Here(Config(), place or ProcessEnv())


def found(check, state, here, **options) -> str:
    """What the check tells, and what to do; all its findings must be of that `state`."""
    rows = list(check(here, **options))
    assert {row.state for row in rows} == {state}, rows
    assert state in (OK, UNCHECKED) or all(row.remedy for row in rows)
    return "\n".join(f"{row.text}; {row.remedy}" for row in rows)
