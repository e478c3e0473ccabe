"""What a check has found, in one process or many, and how it is told."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from jaxdist.cluster.process_env import ProcessEnv
from jaxdist.config import Config

OK, WARNING, WRONG, UNCHECKED = "ok", "warning", "wrong", "not checked"
"""Only what is wrong makes the exit code 2."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    state: str
    text: str
    """What is so, or, if anything is wrong, what."""
    remedy: str = ""
    """What to do."""
    host: str = ""


@dataclass
class Here:
    """This process, and what the checks leave for each other."""

    config: Config
    place: ProcessEnv = field(default_factory=ProcessEnv)
    environment: MutableMapping[str, str] = field(default_factory=lambda: os.environ)
    gpus: int = 0
    """That the driver shows."""
    buses: tuple[str, ...] = ()
    """Where those are on the PCI bus, which tells them apart on a host; empty where that is not known."""

    def gpu(self, number: int) -> str:
        """The name on this host of the GPU that is `number` for CUDA."""
        visible = self.environment.get("CUDA_VISIBLE_DEVICES")
        known = list(self.buses or map(str, range(self.gpus)))
        shown = [word.strip() for word in visible.split(",")] if visible else [str(i) for i in range(len(known))]
        word = shown[number] if number < len(shown) else str(number)
        return known[int(word)] if word.isdecimal() and int(word) < len(known) else word


def ok(check: str, text: str) -> Finding:
    return Finding(check, OK, text)


def warning(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, WARNING, text, remedy)


def wrong(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, WRONG, text, remedy)


def unchecked(check: str, why: str) -> Finding:
    return Finding(check, UNCHECKED, why)


ALL = "all"
"""In place of a host: true of the job as a whole."""


def for_all(findings: Iterable[Finding]) -> list[Finding]:
    """What one process found for all."""
    return at(ALL, findings)


def at(host: str, findings: Iterable[Finding]) -> list[Finding]:
    """The same, found on that host."""
    return [replace(finding, host=finding.host or host) for finding in findings]


def report(findings: Sequence[Finding], processes: int) -> dict[str, Any]:
    """All of them as JSON has it: once each, with the hosts on which it is so, in the order of the checks."""
    order = {name: i for i, name in enumerate(dict.fromkeys(finding.check for finding in findings))}
    hosts: dict[Finding, list[str]] = {}
    for finding in sorted(findings, key=lambda finding: order[finding.check]):
        there = hosts.setdefault(replace(finding, host=""), [])
        if finding.host not in there:
            there.append(finding.host)
    rows = [asdict(finding) | {"hosts": there} for finding, there in hosts.items()]
    for row in rows:
        del row["host"]
    healthy = not any(finding.state == WRONG for finding in findings)
    return {"healthy": healthy, "processes": processes, "findings": rows}


def told(result: Mapping[str, Any], width: int = 120) -> Iterator[str]:
    """The report for people."""
    rows = result["findings"]
    everywhere = {host for row in rows for host in row["hosts"]} - {ALL}
    name = max((len(row["check"]) for row in rows), default=0)
    indent = " " * (13 + name + 2)
    for row in rows:
        text = "; ".join(part for part in (row["text"], row["remedy"]) if part)
        if ALL not in row["hosts"] and set(row["hosts"]) != everywhere:
            text += f"  [{', '.join(row['hosts'])}]"
        head = f"{row['state']:<13}{row['check']:<{name}}  "
        yield textwrap.fill(text, width, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    count = sum(row["state"] == WRONG for row in rows)
    yield "healthy, as far as was checked" if result["healthy"] else f"{count} thing(s) wrong"
