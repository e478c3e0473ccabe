"""Naming a host that the doctor has found bad in the folder of a run: the job script of Slurm then leaves it out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from jaxdist.cluster import heartbeat
from jaxdist.config import RequestError
from jaxdist.files import read_regular
from jaxdist.output.streams import clock
from jaxdist.training.run_dir import RunFolder


def name_hosts(folder: Path, bad: Mapping[str, str]) -> list[str]:
    """Name `bad` hosts, each with the reason, in the folder of a run, and return a sentence for each.

    Where there is no such folder, or it cannot be written, nothing happens.
    """
    run = RunFolder(folder)
    sentences = []
    for host, reason in bad.items():
        with suppress(OSError, RequestError):
            run.check_layout()
            # Only that of a run: a run that has not begun has the folder of the logs of its job.
            run.heartbeats.mkdir(exist_ok=True)
            if heartbeat.name_host(run.heartbeats, host, f"jaxdist.doctor: {reason}"):
                file = run.heartbeats / heartbeat.NAMED
                sentences.append(f"{host} is named in {file}: the next start of a Slurm job leaves it out")
    return sentences


def named(folder: Path) -> set[str]:
    """Return the hosts that were named since the present start of the run in a folder."""
    run = RunFolder(folder)
    leader = next(iter(heartbeat.read(run.heartbeats, only=[0])), None)
    began = leader.spent.began if leader and leader.spent else 0.0
    since = clock(began)
    try:
        lines = read_regular(run.heartbeats / heartbeat.NAMED).decode(errors="replace").splitlines()
    except OSError:
        return set()
    words = [line.split(maxsplit=2) for line in lines]
    return {host for host, time, *_ in (found for found in words if len(found) > 1) if time >= since}
