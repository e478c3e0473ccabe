"""Tokens per second of greedy decoding beside transformers: the same weights, float32, one CPU device or two threads.

    python benchmarks/generate.py --transformers PYTHON [--rounds 9] [--tokens 128] [--batches 1 8]
        [--sequences 256 512]

PYTHON is an interpreter that has torch and transformers; this one needs neither. It writes a folder with a small Llama
of random weights for each length of `model.sequence`, which both sides load. Each side is a process of its own, warmed
up; then they take turns. What is timed are the tokens after the first one, so the prefill of the prompts is not. Both
must draw the same tokens. Printed are medians, and the median of each turn's ratio: the time of transformers over that
of jaxdist, and the same for the CPU time of all threads, which depends less on other jobs on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

SIZES = dict(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
)
PROMPT = 64
"""Tokens of each prompt."""

REST = 0.5
"""Seconds between two turns, in which threads that wait by spinning give up."""


def prompts(rows: int) -> list[list[int]]:
    """Return prompts without a pattern, the same in all processes."""
    return [[(7919 * (row + 1) * (place + 3)) % SIZES["vocab_size"] for place in range(PROMPT)] for row in range(rows)]


def now() -> list[float]:
    """Return the time, and the CPU time of all threads of this process, in seconds."""
    return [time.perf_counter(), time.process_time()]


class OfJaxdist:
    """jaxdist, as `generate` calls it."""

    def __init__(self, folder: Path, threads: int):
        # XLA takes as many threads as the process has cores.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
        import jax

        from jaxdist.request import arguments
        from jaxdist.training.decoding import Choice, Decoding
        from jaxdist.training.restore import restore

        sequence = json.loads((folder / "config.json").read_text())["max_position_embeddings"]
        words = [str(folder), "--mesh=1x1x1", "--precision=float32", f"--model.sequence={sequence}"]
        request = arguments(words, "generate", "", positional="RUN", pretrained=True)
        trained = restore(request.config, "latest", batch=False)
        self.decoding = Decoding(trained.run, trained.params)
        self.choice = Choice(temperature=0.0, top_k=0)
        self.version = f"jax {jax.__version__}"

    def decode(self, rows: int, tokens: int) -> dict[str, Any]:
        """Return the tokens that are drawn, [tokens, rows], and from the first one to the last [time, CPU time]."""
        drawn = self.decoding.draw(prompts(rows), self.choice, 0, most=tokens)
        found = [next(drawn)]
        begin = now()
        found.extend(drawn)
        seconds = [end - start for start, end in zip(begin, now(), strict=True)]
        return {"seconds": seconds, "tokens": [one.tolist() for one in found]}


class OfTransformers:
    """transformers, as its users call it: `generate` with its usual cache."""

    def __init__(self, folder: Path, threads: int):
        import torch
        import transformers

        torch.set_num_threads(threads)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.version = f"torch {torch.__version__}, transformers {transformers.__version__}"

    def decode(self, rows: int, tokens: int) -> dict[str, Any]:
        """Return the tokens that are drawn, [tokens, rows], and from the first one to the last [time, CPU time]."""
        ids = self.torch.tensor(prompts(rows))
        clock = Clock()
        with self.torch.no_grad():
            found = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
                streamer=clock,
            )
        # The first time is that of the prompt.
        first, last = clock.times[1], clock.times[-1]
        seconds = [end - begin for begin, end in zip(first, last, strict=True)]
        return {"seconds": seconds, "tokens": found[:, PROMPT:].T.tolist()}


class Clock:
    """Takes the time of each token; `generate` of transformers calls it."""

    def __init__(self) -> None:
        self.times: list[list[float]] = []

    def put(self, value: Any) -> None:
        """Note that a token has come."""
        self.times.append(now())

    def end(self) -> None:
        """Do nothing."""


SIDES = {"jaxdist": OfJaxdist, "transformers": OfTransformers}


def serve(side: str, folder: Path, threads: int) -> None:
    """Answer each line of standard input, a batch size and a number of tokens, by a line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    worker = SIDES[side](folder, threads)
    print(json.dumps({"version": worker.version}), file=answers, flush=True)
    for line in sys.stdin:
        rows, tokens = json.loads(line)
        print(json.dumps(worker.decode(rows, tokens)), file=answers, flush=True)


class Side:
    """A process of one side."""

    def __init__(self, python: str, side: str, folder: Path, threads: int):
        words = [python, __file__, "--serve", side, "--folder", str(folder), "--threads", str(threads)]
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.version = self._answer()["version"]

    def decode(self, rows: int, tokens: int) -> dict[str, Any]:
        """Let it decode, while the other side waits."""
        assert self.process.stdin
        print(json.dumps([rows, tokens]), file=self.process.stdin, flush=True)
        return self._answer()

    def end(self) -> None:
        """Let it end."""
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())


WRITE = """
import sys, torch, transformers
torch.manual_seed(0)
config = transformers.LlamaConfig(**{sizes!r})
transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(sys.argv[1])
"""


def compare(sides: dict[str, Side], rows: int, tokens: int, rounds: int) -> str:
    """Return a row of the table: rows of the batch, tokens per second of each side, and ratios."""
    taken: dict[str, list[list[float]]] = {name: [] for name in sides}
    drawn = {name: side.decode(rows, tokens)["tokens"] for name, side in sides.items()}
    for number in range(rounds):
        # Each side is first in every second turn.
        for name in sorted(sides, reverse=bool(number % 2)):
            time.sleep(REST)
            taken[name].append(sides[name].decode(rows, tokens)["seconds"])
    rates = [rows * (tokens - 1) / median(wall for wall, _ in taken[name]) for name in ("jaxdist", "transformers")]
    ratios = [
        [theirs / ours for ours, theirs in zip(*times, strict=True)]
        for times in zip(taken["jaxdist"], taken["transformers"], strict=True)
    ]
    walls = [wall for wall, _ in ratios]
    cpu = median(one for _, one in ratios)
    same = "yes" if drawn["jaxdist"] == drawn["transformers"] else "NO"
    spread = f"{min(walls):.2f} to {max(walls):.2f}"
    return f"{rows:5} {rates[0]:10.1f} {rates[1]:14.1f} {median(walls):7.2f}   {spread:14} {cpu:9.2f}   {same}"


def main() -> None:
    """Print a table for each length of the sequence, with a row for each size of the batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transformers", help="a Python that has torch and transformers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.folder, options.threads)
        return
    for sequence in options.sequences:
        with tempfile.TemporaryDirectory() as folder:
            table(options, sequence, folder)


def table(options: argparse.Namespace, sequence: int, folder: str) -> None:
    """Print the table for a model that sees `sequence` tokens, whose weights are written into `folder`."""
    sizes = SIZES | {"max_position_embeddings": sequence}
    subprocess.run([options.transformers, "-c", WRITE.format(sizes=sizes), folder], check=True)
    pythons = {"jaxdist": sys.executable, "transformers": options.transformers}
    sides = {name: Side(python, name, Path(folder), options.threads) for name, python in pythons.items()}
    print(", ".join(side.version for side in sides.values()), f"{options.threads} threads", sep=", ", end=", ")
    print(f"load {os.getloadavg()[0]:.1f}")
    print(", ".join(f"{name} {value}" for name, value in sizes.items() if value))
    print(f"{PROMPT} tokens of prompt, {options.tokens} tokens drawn, {options.rounds} turns; tokens per second")
    print(" rows    jaxdist   transformers   ratio   least to most  CPU ratio   same tokens")
    for rows in options.batches:
        print(compare(sides, rows, options.tokens, options.rounds), flush=True)
    print(f"load {os.getloadavg()[0]:.1f}")
    for side in sides.values():
        side.end()


if __name__ == "__main__":
    main()
