"""A run as a job of Slurm: the sbatch script that starts it, hands signals on, requeues it, and knows when to stop.

The values stand at the top of the script, each quoted; the text of `slurm_text` that follows is the same for every run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxdist.cluster.address import NUMBER
from jaxdist.cluster.local import PATIENCE, PAUSE
from jaxdist.cluster.slurm_text import BODY, GO_BACK, MEET, RESUME
from jaxdist.cluster.slurm_values import node_counts
from jaxdist.config import RequestError, nearest

MARGIN = 30
"""Seconds beyond the grace of the run in which it is asked to stop before its time is over."""

LAST_WORDS = 30
"""Seconds in which the other tasks end by themselves, with their own exit code, when one has ended."""

FOLDER = "slurm"
"""In the run folder: the logs of its jobs, and how often they have failed."""

PRESETS = {
    # CSCS's documentation, "NCCL" (docs.cscs.ch/software/communication/nccl): the first makes a plug-in that is missing
    # an error, in place of TCP; the last but one is its advice against deadlocks with MPI
    "alps": {
        "NCCL_NET": "AWS Libfabric",
        "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_CROSS_NIC": "1",
        "NCCL_PROTO": "^LL128",
        "FI_CXI_DEFAULT_CQ_SIZE": "131072",
        "FI_CXI_DEFAULT_TX_SIZE": "16384",
        "FI_CXI_DISABLE_HOST_REGISTER": "1",
        "FI_CXI_RX_MATCH_MODE": "software",
        "FI_MR_CACHE_MONITOR": "userfaultfd",
        "MPICH_GPU_SUPPORT_ENABLED": "0",
        "NCCL_DEBUG": "WARN",
    },
    # NCCL's documentation, "Environment Variables": it finds the adapters; named, a network that is missing is an error
    "infiniband": {"NCCL_NET": "IB", "NCCL_DEBUG": "WARN"},
    "ethernet": {"NCCL_NET": "Socket", "NCCL_DEBUG": "WARN"},
}
"""What a network needs, by name: Slingshot 11 with libfabric and aws-ofi-nccl; InfiniBand or RoCE; TCP."""

INHERITED = ("CUDA_VISIBLE_DEVICES", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
INHERITED += ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""What a login shell may have set, and Slurm hands to the job: it would say otherwise than the job."""


@dataclass(frozen=True)
class Script:
    """What stands in the script; `text` is the whole of it."""

    train: Sequence[str]
    """argv of train, without its Python, `--run-dir` and `--resume`."""
    run_dir: Path
    nodes: str
    tasks_per_node: int
    time: str
    grace: float
    """Seconds from a signal to the end of the run."""
    python: str
    home: Path
    """Folder in which it runs, and in which paths that are not absolute begin."""
    gpus_per_node: int = 0
    cpus_per_task: int = 0
    """0: as Slurm does without."""
    name: str = ""
    """Empty: that of the run folder."""
    partition: str = ""
    account: str = ""
    container: str = ""
    reads: Sequence[Path] = ()
    """What it needs beside the run folder, for a container."""
    environment: str = ""
    restarts: int = 3
    resume: str = "auto"
    newest: int = 0
    """Step of the newest checkpoint that is there now."""
    pause: int = PAUSE
    patience: int = PATIENCE
    """Seconds: a run folder that is in use is tried again after `pause`, and no more after `patience`."""

    @property
    def logs(self) -> Path:
        return self.run_dir / FOLDER

    def text(self) -> str:
        """The script. Raises `RequestError` where a value cannot be written into it."""
        values = {
            "run": shlex.quote(operand(self.run_dir)),
            "tasks": str(self.tasks_per_node),
            "restarts": f"{self.restarts} # at most so many in a row that bring no new checkpoint",
            "pause": f"{self.pause} # seconds until a run folder that is in use is tried again",
            "patience": f"{self.patience} # seconds for which it is tried again, at most",
            "srun": _array(self._srun()),
            "train": _array(["python" if self.container else self.python, "-m", "jaxdist.train", *self.train]),
        }
        parts = {
            "inherited": " ".join(INHERITED),
            "environment": self._environment(),
            "meet": MEET if self.container else "",
            "resume": self._resume(),
            "last_words": str(LAST_WORDS),
        }
        names = "|".join(parts)
        body = re.sub("{(" + names + ")}", lambda match: parts[match[1]], BODY)  # in one pass: a value is no name
        return "\n".join(
            [
                "#!/bin/bash",
                *(f"#SBATCH --{option}{value and '='}{value}" for option, value in self._directives().items()),
                "",
                "# Written by python -m jaxdist.launch slurm (docs/slurm.md). The folder of the log must exist.",
                *(f"{name}={value}" for name, value in values.items()),
                body,
            ]
        )

    def _directives(self) -> dict[str, str]:
        """Option -> value of the lines that sbatch reads."""
        log = str(self.logs).replace("%", "%%") + "/%j.log"
        if "\\" in log:
            raise RequestError(f"run folder {self.run_dir} has a backslash, which Slurm takes away; name another")
        chosen = {
            "job-name": self.name or self.run_dir.name,
            "partition": self.partition,
            "account": self.account,
            "chdir": str(self.home),
            "output": log,
            "open-mode": "append",
            "nodes": self.nodes,
            **self._tasks(),
            "gpus-per-node": str(self.gpus_per_node or ""),
            "cpus-per-task": str(self.cpus_per_task or ""),
            "time": self.time,
            "signal": f"B:USR1@{warning(self.grace)}",
        }
        return {option: directive(option, value) for option, value in chosen.items() if value} | {"requeue": ""}

    def _tasks(self) -> dict[str, str]:
        """How many on a node; where the nodes are a range, the cores for them: given tasks, Slurm takes no more nodes
        than the fewest have tasks."""
        fewest, most = node_counts(self.nodes)
        if fewest == most:
            return {"ntasks-per-node": str(self.tasks_per_node)}
        return {"mincpus": str(self.tasks_per_node * (self.cpus_per_task or 1))}

    def _srun(self) -> list[str]:
        """Its options beside those that all runs have."""
        options = [f"--cpus-per-task={self.cpus_per_task}"] if self.cpus_per_task else []  # srun takes none from sbatch
        if not self.container:
            return options
        if self.container.endswith(".toml"):  # CSCS's container engine; it says what is mounted, and where it starts
            return [*options, f"--environment={Path(self.container).absolute()}"]
        mounts = self._mounts()
        if wrong := [path for path in mounts if set(path) & set(",:")]:
            raise RequestError(f"{wrong[0]} cannot be mounted in a container: its name has a comma or a colon")
        mounted = ",".join(f"{path}:{path}" for path in mounts)
        image = [f"--container-image={self.container}", f"--container-mounts={mounted}"]
        return [*options, *image, f"--container-workdir={self.home}"]

    def _mounts(self) -> list[str]:
        """The folder in which it runs, and what lies elsewhere."""
        others = {self.home / path for path in (self.run_dir, *self.reads)}
        return [str(self.home), *sorted(str(path) for path in others if not path.is_relative_to(self.home))]

    def _environment(self) -> str:
        if not self.environment:
            return ""
        if (preset := PRESETS.get(self.environment)) is None:
            return f". {shlex.quote(str(Path(self.environment).absolute()))} || exit 2\n"
        return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in preset.items())

    def _resume(self) -> str:
        if not self.resume.isdecimal():
            return RESUME[self.resume]
        if int(self.resume) == self.newest:
            return RESUME["auto"]
        return GO_BACK.replace("{step}", self.resume).replace("{newest}", str(self.newest))


def operand(path: Path) -> str:
    """A path that no command takes for an option, whatever its name begins with."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def _array(words: Sequence[str]) -> str:
    return f"({shlex.join(words)})"


def warning(grace: float) -> int:
    """Seconds before the end of its time at which a job is asked to stop."""
    return int(grace) + MARGIN


def directive(option: str, value: str) -> str:
    """A value as sbatch reads it in a line of `#SBATCH`, which is not the shell's way.

    There are quotes, a backslash within and without them, and comments; nothing is expanded. Raises `RequestError` for
    what no line can hold.
    """
    if not value.isprintable():
        raise RequestError(f"--{option} of the job would be {value!r}, which does not fit into a line; choose another")
    if re.fullmatch(r"[\w./%:@,+=-]+", value, re.ASCII):
        return value
    return '"' + re.sub(r'(["\\])', r"\\\1", value) + '"'


def make_logs(folder: Path) -> None:
    """Make the folder of the logs: Slurm ends a job that has nowhere to write to without a word.

    `RunFolder.check_layout` has refused a link in its place. Raises `RequestError` where it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{folder} cannot be made ({error.strerror}); name another --run-dir") from error


def submit(script: str) -> str:
    """Give a script to sbatch. The number of the job. Raises `RequestError` where Slurm does not take it."""
    # of an allocation that this may run in, which sbatch would hand on to the job
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    if conf := os.environ.get("SLURM_CONF"):
        environment["SLURM_CONF"] = conf
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, env=environment, capture_output=True, text=True, check=False
        )
    except FileNotFoundError as error:
        raise RequestError("sbatch is not found here; submit on a login node of the cluster") from error
    if done.returncode:
        raise RequestError(f"Slurm does not take the job: {' '.join(done.stderr.split())}")
    return done.stdout.strip().partition(";")[0]


def check_container(image: str) -> None:
    """Raise `RequestError` where `--container` is an image of Apptainer's, which pyxis does not take."""
    if Path(image).suffix == ".sif":
        raise RequestError(
            f"--container '{image}' is an image of Apptainer's, which pyxis does not take: give a .sqsh file (enroot "
            f"import makes one) or the name of an image in a registry, such as nvcr.io#nvidia/jax:25.10-py3"
        )


def check_partition(name: str, nodes: str) -> None:
    """Raise `RequestError` where a job asks for more nodes than its partition has or allows: it would wait for ever.

    Without a `name` it is the default partition, and of several names, with commas, one is enough. Where Slurm is not,
    or does not tell, nothing is known.
    """
    try:
        command = ["scontrol", "--oneliner", "show", "partition"]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return
    rows = [dict(word.partition("=")[::2] for word in line.split()) for line in done.stdout.splitlines()]
    names = name.split(",")
    asked = [row for row in rows if (row.get("PartitionName") in names if name else row.get("Default") == "YES")]
    most = {row["PartitionName"]: _most_nodes(row) for row in asked}
    fewest, _ = node_counts(nodes)
    if not most or None in most.values() or max(most.values()) >= fewest:
        return
    told = ", ".join(f"{partition} takes {count}" for partition, count in most.items())
    raise RequestError(f"--nodes {nodes} is more than a job can have: partition {told}; ask for fewer, or for another")


def _most_nodes(row: dict[str, str]) -> int | None:
    """Of a job in a partition, from its line of `scontrol show partition`; None where that does not tell."""
    counts = [row[key] for key in ("TotalNodes", "MaxNodes") if NUMBER.fullmatch(row.get(key, ""))]
    return min(map(int, counts), default=None)


def check_environment(name: str) -> None:
    """Raise `RequestError` where `--env` names neither a preset nor a file."""
    if name and name not in PRESETS and not Path(name).is_file():
        raise RequestError(f"--env is '{name}', neither a file nor a preset; {nearest(name, PRESETS)}")
