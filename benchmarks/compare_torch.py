"""jaxdist against PyTorch on this CPU: the same model, weights, batch and update, taking turns on the same machine.

    python benchmarks/compare_torch.py --torch PYTHON --jaxdist PYTHON [--jaxdist PYTHON ...] [--out FILE]

Each PYTHON is an interpreter that has torch, or jaxdist, installed. All workers of a table are started and warmed
before the first turn; then they run one after the other, round after round, and medians are printed. The losses of
the last step must agree to 1e-4 (bfloat16: 1e-2), or the comparison fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
TABLES = (
    "single float32",
    "2 workers float32",
    "FSDP float32",
    "tensor parallel float32",
    "ZeRO stages float32",
    "single bfloat16",
)


@dataclass
class Job:
    """One row of a table: a worker, or the ranks of one, that take every turn together."""

    name: str
    commands: list[list[str]]
    environments: list[dict[str, str]]
    base: int = 0
    """The row that this one is compared with."""
    processes: list[subprocess.Popen] = field(default_factory=list)
    turns: list[dict] = field(default_factory=list)
    matmul: list[float] = field(default_factory=list)

    def start(self) -> None:
        for command, extra in zip(self.commands, self.environments, strict=True):
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.processes.append(subprocess.Popen(command, env=os.environ | extra, cwd=HERE, **pipes))
        self.name = f"{self._answers()[0]['library']}, {self.name}"

    def ask(self, line: str) -> list[dict]:
        for process in self.processes:
            process.stdin.write(line + "\n")
            process.stdin.flush()
        return self._answers()

    def take(self, steps: int) -> dict:
        """Seconds a step (wall: of the slowest rank; CPU: of all ranks), the mean loss of each step, peak bytes."""
        ranks = self.ask(f"step {steps}")
        losses = [statistics.mean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
        total = lambda key: sum(rank[key] for rank in ranks)
        return dict(wall=max(rank["wall"] for rank in ranks), cpu=total("cpu"), losses=losses, rss=total("rss"))

    def stop(self) -> None:
        for process in self.processes:
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    def _answers(self) -> list[dict]:
        """The next JSON line of every process; gloo writes lines of its own in between."""
        answers = []
        for process in self.processes:
            line = next((line for line in process.stdout if line.startswith("{")), None)
            if line is None:
                raise SystemExit(f"'{self.name}' ended early; run it by hand: {' '.join(process.args)}")
            answers.append(json.loads(line))
        return answers

    def row(self) -> dict:
        median = lambda key: statistics.median(turn[key] for turn in self.turns)
        return {
            "name": self.name,
            "base": self.base,
            "wall_seconds": median("wall"),
            "cpu_seconds": median("cpu"),
            "peak_bytes": self.turns[-1]["rss"],
            "last_loss": self.turns[-1]["losses"][-1],
            "f32_matmul_gflops_per_second": max(self.matmul),
            "turns": [{key: turn[key] for key in ("wall", "cpu")} for turn in self.turns],
        }


def torch_job(python: str, precision: str = "float32") -> Job:
    threads = os.cpu_count()
    command = [python, "torch_gpt.py", f"--threads={threads}", f"--precision={precision}"]
    return Job(f"eager, {threads} threads", [command], [dict(OMP_NUM_THREADS=str(threads))])


def torch_ranks(python: str, parallel: str, ranks: int = 2) -> Job:
    """PyTorch over gloo: a process of 1 thread for each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [python, "torch_gpt.py", f"--parallel={parallel}", "--threads=1"]
    common = dict(WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
    name = dict(ddp="DDP", fsdp="FSDP2", tensor="tensor parallel")[parallel]
    environments = [common | dict(RANK=str(rank)) for rank in range(ranks)]
    return Job(f"{name}, {ranks} processes x 1 thread", [command] * ranks, environments)


def jaxdist_job(python: str, name: str, *options: str, precision: str = "float32", base: int = 0) -> Job:
    command = [python, "jaxdist_gpt.py", f"--precision={precision}", *options]
    return Job(f"jaxdist, {name}", [command], [{}], base)


def jobs(table: str, torch: str, jaxdist: list[str]) -> list[Job]:
    """The rows of a table: PyTorch and what is compared with it; of ZeRO, every stage and stage 0 of the same jax."""
    kind, _, precision = table.rpartition(" ")
    match kind:
        case "single":
            one = [jaxdist_job(python, "1 device", precision=precision) for python in jaxdist]
            return [torch_job(torch, precision), *one]
        case "2 workers":
            data = [jaxdist_job(python, "data=2 in 1 process", "--mesh=2x1x1") for python in jaxdist]
            return [torch_ranks(torch, "ddp"), *data]
        case "FSDP":
            name, options = "data=2 in 1 process, ZeRO 3", ("--mesh=2x1x1", "--zero=3")
            return [torch_ranks(torch, "fsdp"), *(jaxdist_job(python, name, *options) for python in jaxdist)]
        case "tensor parallel":
            name, mesh = "model=2 in 1 process", "--mesh=1x2x1"
            whole = [jaxdist_job(python, f"{name}, whole vocabulary", mesh, "--whole-vocab") for python in jaxdist]
            split = [jaxdist_job(python, f"{name}, split vocabulary", mesh) for python in jaxdist]
            return [torch_ranks(torch, "tensor"), *whole, *split]
    stages = range(4)
    stage = lambda python, n, base: jaxdist_job(python, f"data=2, ZeRO {n}", "--mesh=2x1x1", f"--zero={n}", base=base)
    return [stage(python, n, len(stages) * at) for at, python in enumerate(jaxdist) for n in stages]


def measure(table: str, running: list[Job], rounds: int, steps: int, warmup: int) -> list[dict]:
    with ExitStack() as stack:
        for job in running:
            stack.callback(job.stop)
            job.start()
            job.take(warmup)
        for number in range(rounds):
            for job in running:
                job.turns.append(job.take(steps))
            print(f"{table}: round {number + 1} of {rounds}", file=sys.stderr)
        for job in running * 3:
            job.matmul.append(job.ask("matmul")[0]["gflops_per_second"])
    rows = [job.row() for job in running]
    tolerance = 1e-2 if "bfloat16" in table else 1e-4
    for row in rows:
        apart = abs(row["last_loss"] - rows[0]["last_loss"])
        assert apart < tolerance, f"{row['name']} did other work: its last loss is {apart:.2g} from {rows[0]['name']}"
    return rows


def show(table: str, rows: list[dict]) -> str:
    lines = [
        table,
        f"{'':<60}{'wall ms':>9}{'rate':>6}{'CPU ms':>9}{'rate':>6}{'peak MiB':>10}"
        f"{'last loss':>11}{'matmul GF/s':>13}",
    ]
    for row in rows:
        wall, cpu = (rows[row["base"]][key] / row[key] for key in ("wall_seconds", "cpu_seconds"))
        lines.append(
            f"{row['name']:<60}{row['wall_seconds'] * 1e3:>9.0f}{wall:>6.2f}{row['cpu_seconds'] * 1e3:>9.0f}{cpu:>6.2f}"
            f"{row['peak_bytes'] / 2**20:>10.0f}{row['last_loss']:>11.5f}{row['f32_matmul_gflops_per_second']:>13.0f}"
        )
    return "\n".join(lines)


def machine() -> dict:
    with open("/proc/cpuinfo") as info:
        about = dict(line.split(":", 1) for line in info if ":" in line)
    about = {key.strip(): value.strip() for key, value in about.items()}
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": " ".join(about.get(key, "?") for key in ("model name", "cpu family", "model")),
        "cores": os.cpu_count(),
        "avx512": "avx512f" in about.get("flags", ""),
        "avx512_bf16": "avx512_bf16" in about.get("flags", ""),
        "kernel": platform.release(),
        "load_before": os.getloadavg(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", default=sys.executable, help="interpreter that has torch")
    parser.add_argument("--jaxdist", action="append", help="interpreter that has jaxdist; may be given more than once")
    parser.add_argument("--table", action="append", choices=TABLES, help="only this table; may be given more than once")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="steps a turn")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the first turn")
    parser.add_argument("--out", type=Path, help="JSON file to write; the tables go beside it as .txt")
    args = parser.parse_args()

    result: dict = {"machine": machine(), "tables": {}}
    for table in args.table or TABLES:
        running = jobs(table, args.torch, args.jaxdist or [sys.executable])
        result["tables"][table] = measure(table, running, args.rounds, args.steps, args.warmup)
        print(show(table, result["tables"][table]) + "\n", flush=True)
    result["machine"]["load_after"] = os.getloadavg()
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        args.out.with_suffix(".txt").write_text("\n\n".join(show(*item) for item in result["tables"].items()) + "\n")


if __name__ == "__main__":
    main()
