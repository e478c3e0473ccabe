"""`python -m jaxdist.doctor [CONFIG]`: checks machines, network and folders before a run, in all of its processes.

`python -m jaxdist.doctor RUN`: who is slow or silent in a run.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from jaxdist.cluster.process_env import ProcessEnv, find
from jaxdist.config import ClusterConfig, Config, RequestError
from jaxdist.doctor import findings, machine, software, watching
from jaxdist.doctor.findings import Finding, Here, unchecked, wrong
from jaxdist.exit_codes import DONE, REFUSED
from jaxdist.request import Extra, arguments, run
from jaxdist.request.options import Scan

DESCRIPTION = (
    "Check this machine, or all machines of a run, before it starts: give the options of the run, and start it as the "
    "run is started, under srun or with --cluster options. With the folder of a RUN in place of CONFIG: who is slow or "
    "silent in it. Exit code 2 when something is wrong."
)
JSON = Extra("json", False, "Print one JSON object on standard output, and nothing else.")

PATIENCE = 120.0
"""Seconds that devices may take to start, or an all-reduce to come back."""

BEFORE: list[tuple[str, Callable[[Here], Iterable[Finding]]]] = [
    ("versions", software.versions),
    ("XLA_FLAGS", software.xla_flags),
    ("memory", software.memory),
    ("driver", machine.driver),
    ("limits", machine.limits),
    ("cache", machine.caches),
]
"""Checks that need no JAX, and mend the environment of this process so far that it can be used."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    words = Scan.of(argv, [JSON]).positionals
    if words and words[0] and os.path.isfile(os.path.join(words[0], "config.toml")):
        asked = arguments(argv, "doctor", DESCRIPTION, positional="RUN", extras=[JSON], knobs=())
        result = watching.watch(Path(words[0]))
        print(json.dumps(result) if asked.extras["json"] else "\n".join(watching.table(result)))
        return DONE if result["healthy"] else REFUSED
    asked = arguments(argv, "doctor", DESCRIPTION, extras=[JSON])
    try:
        place, lost = find(asked.config.cluster), []
    except RequestError as error:
        place, lost = ProcessEnv(), [wrong("processes", problem, "") for problem in error.problems]
    config = asked.config.model_copy(update={"cluster": ClusterConfig()})
    return Doctor(Here(config, place), asked.extras["json"], lost).examine()


class Doctor:
    """The checks of one process, in their order, and the report of all."""

    def __init__(self, here: Here, as_json: bool, found: list[Finding]):
        self.here, self.as_json, self.found = here, as_json, found
        self.host = socket.gethostname()

    def examine(self) -> int:
        """Make all checks that can be made, and print one report. Returns the exit code."""
        lost = bool(self.found)
        for name, check in BEFORE:
            self.note(name, lambda check=check: check(self.here))
        try:
            from jaxdist.doctor import network
        except Exception as error:  # JAX itself does not start
            self.found.append(wrong("jax", f"cannot be imported: {error}".splitlines()[0], "see versions"))
            return self.tell(self.found)
        if lost:
            self.found.append(unchecked("network", "the processes do not know who they are"))
            return self.tell(self.found)
        for name, check in (
            ("compiler", software.options),
            ("proxies", network.proxies),
            ("own name", network.own_name),
        ):
            self.note(name, lambda check=check: check(self.here))
        if not self.meet():
            return self.tell(self.found)
        from jaxdist.cluster import faults, kv_store

        with faults.ending_all(self.here.place):
            return self.end(self.together(kv_store.gather))

    def note(self, name: str, check: Callable[[], Iterable[Finding]]) -> None:
        """Add what a check finds; one that fails itself says so."""
        try:
            self.found += check()
        except Exception as error:
            self.found.append(unchecked(name, f"the check failed with {type(error).__name__}: {error}"))

    def meet(self) -> bool:
        """Whether the processes have met."""
        from jaxdist.cluster import listening, rendezvous

        place, fault = self.here.place, self.here.config.fault
        if place.alone:
            return True
        try:
            if place.leader:
                bind, _ = listening.bind_address(place.coordinator)
                listening.check_free(bind)
        except RequestError as error:
            self.found.append(wrong("processes", *error.problems[0].split("; ")))
            return False
        rendezvous.meet_unchecked(place, fault, self.nobody)
        self.found.append(findings.ok("processes", f"all {place.processes} have met at {place.coordinator}"))
        return True

    def nobody(self) -> NoReturn:
        """The others have not come."""
        from jaxdist.cluster import rendezvous

        place, seconds = self.here.place, self.here.config.fault.start_seconds
        said = f"after {seconds} s not all {place.processes} processes have met at {place.coordinator}"
        self.give_up(wrong("processes", said, rendezvous.why_incomplete(place)))

    def give_up(self, finding: Finding) -> NoReturn:
        """End with what is known, from a thread, while the main one hangs."""
        code = self.tell([*self.found, finding])
        sys.stdout.flush()
        os._exit(code)

    def together(self, gather: Callable[..., list]) -> list[Finding]:
        """The checks that all processes make with each other; what each has found."""
        from jaxdist.doctor import network

        here = self.here
        for name, check in ("hosts", network.hosts), ("clocks", network.clocks):
            self.note(name, lambda check=check: check(here))
        bad = any(one.state == findings.WRONG and one.check in ("hosts", "own name") for one in self.found)
        if any(gather("doctor/network", bad)):
            why = "devices could not talk over this network"
            self.note("run folder", lambda: findings.for_all(network.folder(here, None)))
            self.found += findings.for_all(unchecked(name, why) for name in ("devices", "all-reduce", "NCCL"))
        else:
            self.with_devices()
        everyone = gather("doctor/found", [vars(one) for one in findings.at(self.host, self.found)])
        gone = (f"process {i} went silent" for i, process in enumerate(everyone) if process is None)
        silent = [wrong("processes", text, "see what it says itself") for text in gone]
        told = [Finding(**one) for process in everyone for one in process or ()]
        return [*told, *findings.at(self.host, silent)]

    def with_devices(self) -> None:
        from jaxdist.cluster import kv_store
        from jaxdist.doctor import devices, network

        here = self.here
        hosts = kv_store.gather("doctor/host of process", self.host)
        log = devices.listen_to_nccl(here)
        with self.patience("devices", "they have not started"):
            mesh, size = self.mesh()
        self.note("run folder", lambda: findings.for_all(network.folder(here, size)))
        if mesh is None:
            self.found.append(unchecked("all-reduce", "there is no mesh"))
            return
        self.note("devices", lambda: devices.seen(here))
        with self.patience("all-reduce", "it has not come back"):
            self.note("all-reduce", lambda: devices.reductions(here, mesh, hosts))
        self.note("NCCL", lambda: devices.nccl(here, log))

    def mesh(self):
        """The mesh of the run, and the bytes of a checkpoint; None for both where the request does not fit."""
        import jax

        from jaxdist.cluster import runtime
        from jaxdist.mesh import AUTO, parse_mesh
        from jaxdist.training.run import Run
        from jaxdist.training.save_policy import checkpoint_bytes

        try:
            asked = self.here.config
            if asked.mesh == AUTO:  # any mesh of all devices will do
                asked = asked.model_copy(update={"mesh": Config().mesh})
            mesh = runtime.start(parse_mesh(asked.mesh))  # of all: a run may have no use for some of them
            made = Run(asked, batch=False, devices=list(mesh.devices.flat))
            with jax.set_mesh(mesh):
                return mesh, checkpoint_bytes(made)
        except RequestError as error:
            self.found += [wrong("mesh", problem, "") for problem in error.problems]
        except Exception as error:
            self.found.append(wrong("devices", f"JAX does not start them: {error}".splitlines()[0], "see driver"))
        return None, None

    def patience(self, name: str, what: str):
        return Patience(lambda: self.give_up(wrong(name, f"{what} after {PATIENCE:g} s", "see hosts, driver, NCCL")))

    def tell(self, found: list[Finding]) -> int:
        """Print the report. Returns the exit code."""
        result = findings.report(findings.at(self.host, found), self.here.place.processes)
        print(json.dumps(result) if self.as_json else "\n".join(findings.told(result)), flush=True)
        return DONE if result["healthy"] else REFUSED

    def end(self, found: list[Finding]) -> int:
        """The first process tells, and all exit alike."""
        place = self.here.place
        if place.leader:
            code = self.tell(found)
        else:
            code = DONE if findings.report(found, place.processes)["healthy"] else REFUSED
        if not place.alone:
            import jax

            from jaxdist.cluster import faults

            with suppress(Exception):
                jax.distributed.shutdown()
            faults.leave(ProcessEnv(), code)
        return code


class Patience:
    """A context manager that calls `then`, in a thread, where its block takes longer than `PATIENCE`."""

    def __init__(self, then: Callable[[], None]):
        self._timer = threading.Timer(PATIENCE, then)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()


if __name__ == "__main__":
    run(main)
