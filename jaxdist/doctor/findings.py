"""Findings of the doctor's checks, in one process or many, and the report made of them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.config import Config, RequestError
from jaxdist.output.units import counted

OK = "ok"
"""State of a finding: the check passed."""

WARNING = "warning"
"""State of a finding: a setting costs time or memory."""

WRONG = "wrong"
"""State of a finding: a run would fail. Only this one makes the exit code 2."""

UNCHECKED = "not checked"
"""State of a finding: the check could not be made."""

ALL = "all"
"""Stands for the host where a finding is true of the job as a whole."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    state: str
    text: str
    """What was found."""
    remedy: str = ""
    """What to do about it."""
    host: str = ""
    of_node: bool = False
    """Whether it is a fault of the host itself, which no request of the job can bring about."""


@dataclass
class Here:
    """This process, with what the checks leave for each other."""

    config: Config
    env: ProcessEnv = field(default_factory=ProcessEnv)
    environment: MutableMapping[str, str] = field(default_factory=lambda: os.environ)
    verify: str = ""
    """The command that compares a step of the run with one device."""
    gpus: int = 0
    """Number of GPUs that the driver shows."""
    buses: tuple[str, ...] = ()
    """Addresses of these GPUs on the PCI bus, which tell them apart on a host; empty if unknown."""

    def gpu(self, number: int) -> str:
        """Return the name, unique on this host, of the GPU that CUDA numbers `number`."""
        known = list(self.buses or map(str, range(self.gpus)))
        shown = [str(i) for i in range(len(known))]
        visible = self.environment.get("CUDA_VISIBLE_DEVICES")
        if visible:
            shown = [word.strip() for word in visible.split(",")]
        word = str(number)
        if number < len(shown):
            word = shown[number]
        if word.isdecimal() and int(word) < len(known):
            return known[int(word)]
        return word


def ok(check: str, text: str) -> Finding:
    """Return the finding of a check that passed."""
    return Finding(check, OK, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    """Return a finding that costs time or memory."""
    return Finding(check, WARNING, text, remedy)


def wrong(check: str, text: str, remedy: str, of_node: bool = False) -> Finding:
    """Return a finding that would make a run fail."""
    return Finding(check, WRONG, text, remedy, of_node=of_node)


def refused(check: str, error: RequestError) -> Finding:
    """Return the finding for what a run would refuse: its sentence is `what is wrong; what to change`."""
    text, _, remedy = error.problems[0].partition("; ")
    return wrong(check, text, remedy)


def unchecked(check: str, why: str, remedy: str = "") -> Finding:
    """Return the finding of a check that could not be made; `remedy` says how else to make it."""
    return Finding(check, UNCHECKED, why, remedy)


def for_all(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of one process as findings about the whole job."""
    return at(ALL, findings)


def at(host: str, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings with `host` as theirs, unless they have one."""
    return [replace(finding, host=finding.host or host) for finding in findings]


def bad_hosts(findings: Sequence[Finding]) -> dict[str, str]:
    """Return the hosts that have a fault of their own which no other host of the job has, each with what it is."""
    if len({finding.host for finding in findings} - {ALL}) < 2:
        return {}
    faults: dict[str, dict[str, str]] = {}
    for finding in findings:
        if finding.state == WRONG and finding.of_node:
            faults.setdefault(finding.check, {}).setdefault(finding.host, finding.text)
    single = {check: hosts for check, hosts in faults.items() if len(hosts) == 1}
    return {host: f"{check}: {text}" for check, hosts in reversed(single.items()) for host, text in hosts.items()}


def report(findings: Sequence[Finding], processes: int) -> dict[str, Any]:
    """Return all findings as JSON has them: equal ones once, with their hosts, in the order of the checks."""
    order = {name: i for i, name in enumerate(dict.fromkeys(finding.check for finding in findings))}
    hosts: dict[Finding, list[str]] = {}
    for finding in sorted(findings, key=lambda finding: order[finding.check]):
        found_on = hosts.setdefault(replace(finding, host=""), [])
        if finding.host not in found_on:
            found_on.append(finding.host)
    rows = []
    for finding, found_on in hosts.items():
        row = asdict(finding)
        del row["host"], row["of_node"]
        row["hosts"] = found_on
        rows.append(row)
    healthy = not any(finding.state == WRONG for finding in findings)
    return {"healthy": healthy, "processes": processes, "findings": rows}


def as_text(result: Mapping[str, Any], width: int = 120) -> Iterator[str]:
    """Yield the lines of the report for people."""
    rows = result["findings"]
    everywhere = {host for row in rows for host in row["hosts"]} - {ALL}
    name_width = max((len(row["check"]) for row in rows), default=0)
    indent = " " * (13 + name_width + 2)
    for row in rows:
        text = "; ".join(part for part in (row["text"], row["remedy"]) if part)
        if ALL not in row["hosts"] and set(row["hosts"]) != everywhere:
            text += f"  [{', '.join(row['hosts'])}]"
        head = f"{row['state']:<13}{row['check']:<{name_width}}  "
        yield textwrap.fill(text, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    if result["healthy"]:
        yield "healthy, as far as was checked"
    else:
        yield f"{counted(sum(row['state'] == WRONG for row in rows), 'thing')} wrong"
