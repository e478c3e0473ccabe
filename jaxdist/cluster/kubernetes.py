"""A run as a Job of Kubernetes: the manifest of its pods, with what follows each exit code.

Two forms hold the same pods. An Indexed Job (batch/v1) replaces each pod that fails; since all processes of a run end
together, all are replaced, and meet again. A JobSet (jobset.x-k8s.io/v1alpha2, an extension of Kubernetes) makes them
all anew at once. The fields are those of the published API: `podFailurePolicy` is stable since Kubernetes 1.31.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from jaxdist.cluster.process_env import COORDINATOR, FIRST_PORT, JAX
from jaxdist.config import RequestError
from jaxdist.process.exit_codes import BUSY, REFUSED, STOPPED

MARGIN = 30
"""Seconds, beyond the grace period of the run, after which Kubernetes kills a pod that it has asked to end."""

CONTAINER = "train"
"""Name of the container, and of the one job of a JobSet."""

LONGEST_HOST = 57
"""Characters of a pod's host name: its own name has six more, and a label of DNS at most 63."""

VOLUME = "runs"
"""Name of the volume in the pod."""

INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
"""Where a pod of an Indexed Job finds its number."""

AWAIT = """\
import socket, sys, time
host, seconds = sys.argv[1], float(sys.argv[2])
end = time.monotonic() + seconds
while True:
    try:
        socket.getaddrinfo(host, None)
        break
    except OSError as error:
        if time.monotonic() > end:
            sys.exit(f"after {seconds:g} s there is no {host}: does the pod of process 0 run? ({error})")
    time.sleep(1)
"""
"""Waits until process 0 has a name: train would refuse, for good, a coordinator that is not known yet."""

Form = Literal["job", "jobset"]


@dataclass(frozen=True)
class Manifest:
    """The values of a manifest; `text` returns it."""

    form: Form
    name: str
    """Name of the Job or JobSet, and of the Service by which pods find each other."""
    nodes: int
    """Number of pods, each with one process."""
    gpus_per_node: int
    image: str
    claim: str
    """Name of the PersistentVolumeClaim that all pods mount."""
    mount: Path
    """Where the volume of the claim is mounted."""
    home: Path
    """Folder in which the run starts; relative paths start there."""
    program: Sequence[str]
    """What follows `python`."""
    grace: float
    """Seconds from a signal to the end of the run."""
    start_seconds: int
    """Seconds that the processes wait for each other."""
    restarts: int

    def text(self) -> str:
        """Return the manifest, as YAML. Raises `RequestError` if a value cannot be written into it."""
        documents = [self._job_set()] if self.form == "jobset" else [self._service(), self._job()]
        lines = ["# Written by python -m jaxdist.launch kubernetes (docs/how-to/kubernetes.md); for kubectl apply -f -"]
        for document in documents:
            lines += ["---", *yaml(document)]
        return "\n".join([*lines, ""])

    @property
    def _hosts(self) -> str:
        """What the host names of the pods begin with, before their number."""
        return f"{self.name}-{CONTAINER}-0" if self.form == "jobset" else self.name

    def _service(self) -> dict[str, Any]:
        """Return the headless Service that gives the pods of a Job their names, before they are ready."""
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": self.name},
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {"batch.kubernetes.io/job-name": self.name},
            },
        }

    def _job(self) -> dict[str, Any]:
        # Each of the pods fails when the run does. The field has 32 bits.
        spec = self._spec(min(self.restarts * self.nodes, 2**31 - 1))
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": self.name}, "spec": spec}

    def _job_set(self) -> dict[str, Any]:
        refused = {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
        job = {"name": CONTAINER, "replicas": 1, "template": {"spec": self._spec(0)}}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": self.name},
            "spec": {
                # It makes the Service itself.
                "network": {"enableDNSHostnames": True, "subdomain": self.name, "publishNotReadyAddresses": True},
                "failurePolicy": {"maxRestarts": self.restarts, "rules": [refused]},
                "replicatedJobs": [job],
            },
        }

    def _spec(self, failures: int) -> dict[str, Any]:
        """Return the spec of a Job that ends for good after more than `failures` failed pods that count."""
        return {
            "completionMode": "Indexed",
            "completions": self.nodes,
            "parallelism": self.nodes,
            "backoffLimit": failures,
            "podFailurePolicy": {
                # The first rule that matches decides; a failure that none matches counts.
                "rules": [
                    {"action": "FailJob", "onExitCodes": _exit_codes(REFUSED)},
                    {"action": "Ignore", "onExitCodes": _exit_codes(BUSY, STOPPED)},
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                ]
            },
            "template": {"spec": self._pod()},
        }

    def _pod(self) -> dict[str, Any]:
        coordinator = f"{self._hosts}-0.{self.name}"
        processes, process = JAX
        mounts = [{"name": VOLUME, "mountPath": str(self.mount)}]
        volumes: list[dict[str, Any]] = [{"name": VOLUME, "persistentVolumeClaim": {"claimName": self.claim}}]
        container: dict[str, Any] = {
            "name": CONTAINER,
            "image": self.image,
            "command": ["python", *map(unexpanded, self.program)],
            "workingDir": str(self.home),
            "env": [
                {"name": COORDINATOR, "value": f"{coordinator}:{FIRST_PORT}"},
                {"name": processes, "value": str(self.nodes)},
                {"name": process, "valueFrom": {"fieldRef": {"fieldPath": INDEX}}},
            ],
            "volumeMounts": mounts,
        }
        if self.gpus_per_node:
            container["resources"] = {"limits": {"nvidia.com/gpu": self.gpus_per_node}}
            # NCCL's; a container has 64 MiB of it by default.
            mounts.append({"name": "shm", "mountPath": "/dev/shm"})
            volumes.append({"name": "shm", "emptyDir": {"medium": "Memory"}})
        waiting = {
            "name": "await-process-0",
            "image": self.image,
            "command": ["python", "-c", AWAIT, coordinator, str(self.start_seconds)],
        }
        pod: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": math.ceil(self.grace) + MARGIN,
            "initContainers": [waiting],
            "containers": [container],
            "volumes": volumes,
        }
        # A JobSet writes the subdomain itself.
        return pod if self.form == "jobset" else {"subdomain": self.name, **pod}


def _exit_codes(*codes: int) -> dict[str, Any]:
    return {"containerName": CONTAINER, "operator": "In", "values": sorted(codes)}


def name_of(asked: str, run_dir: Path, form: Form, nodes: int) -> str:
    """Return the name of the job: the one `asked` for, or one like the run folder's, as DNS writes names.

    Raises `RequestError` if the one asked for is no name of DNS, or too long.
    """
    longest = LONGEST_HOST - len(f"-{CONTAINER}-0" if form == "jobset" else "") - len(f"-{nodes - 1}")
    if not asked:
        name = re.sub(r"[^a-z0-9]+", "-", run_dir.name.lower()).strip("-")
        return (name if name[:1].isalpha() else f"run-{name}")[:longest].rstrip("-")
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", asked) or len(asked) > longest:
        raise RequestError(
            f"--job-name is '{asked[:80]}'; it must be small letters, digits and -, the first a letter, and have at "
            f"most {longest} characters: the pods are named after it"
        )
    return asked


def check_mounted(mount: Path, home: Path, paths: Sequence[Path]) -> None:
    """Raise `RequestError` unless the current folder `home`, and all `paths`, lie in the mounted volume."""
    if not mount.is_absolute():
        raise RequestError(f"--mount '{mount}' is not a whole path from /; give the folder of the volume in the pods")
    if ":" in str(mount) or not f"{mount}{home}".isprintable():
        raise RequestError(
            f"--mount '{mount}' cannot be mounted in {home}: a path in a manifest has no colon, and can be printed"
        )
    outside = [path for path in (home, *paths) if not (home / path).resolve().is_relative_to(mount.resolve())]
    if outside:
        raise RequestError(
            f"{outside[0]} is not in {mount}, where the pods mount the volume of the claim: move it there, or give "
            f"another --mount"
        )


def unexpanded(word: str) -> str:
    """Return a word of a command in which Kubernetes, which expands `$(NAME)`, leaves every `$` alone.

    Raises `RequestError` for a word that no line can hold.
    """
    if not word.isprintable():
        raise RequestError(f"{word!r} does not fit into a line of the manifest; choose another")
    return word.replace("$", "$$")


def yaml(value: object) -> list[str]:
    """Return the lines of a value in YAML, of which a scalar's first line has no indentation.

    Texts of several lines are blocks; all others that YAML could take for something else are quoted as in JSON.
    """
    if isinstance(value, dict):
        lines = []
        for key, item in value.items():
            first, *others = yaml(item)
            if isinstance(item, dict | list):
                lines += [f"{key}:", *(f"  {line}" for line in (first, *others))]
            else:
                lines += [f"{key}: {first}", *(f"  {line}" for line in others)]
        return lines
    if isinstance(value, list):
        items = map(yaml, value)
        return [line for first, *others in items for line in (f"- {first}", *(f"  {other}" for other in others))]
    if isinstance(value, str) and "\n" in value:
        return ["|", *value.splitlines()]
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", value) and value.lower() not in WORDS:
        return [value]
    return [json.dumps(value, ensure_ascii=False)]


WORDS = {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "none"}
"""Words that some reader of YAML takes for no text."""


def _image(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9][\w./:@-]{0,254}", text, re.ASCII):
        raise PydanticCustomError("image", "must be the name of an image, such as registry.example/jaxdist:1")
    return text


def _claim(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", text):
        raise PydanticCustomError("claim", "must be the name of a PersistentVolumeClaim, such as runs")
    return text


Image = Annotated[str, AfterValidator(_image)]
Claim = Annotated[str, AfterValidator(_claim)]
