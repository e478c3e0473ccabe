"""What both sides of the comparison share: the model's sizes, first weights, batch, and the worker's conversation.

A worker prints one JSON line when it is ready, then answers every line it is sent with one JSON line:
`step N` (N optimizer steps), `matmul` (the rate of its library's f32 matrix product), `quit`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np

LAYERS, EMBED, HEADS, SEQUENCE, VOCAB, ROWS = 4, 256, 8, 256, 8192, 8
LEARNING_RATE, BETAS, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 0.1

SHAPES = [(2048, 256, 768), (2048, 256, 1024), (2048, 1024, 256), (2048, 256, 8192), (8192, 2048, 256)]
"""(m, k, n) of the model's larger matrix products."""


def weights() -> dict:
    """Normal weights of deviation 0.02, layers stacked, by jaxdist's names and shapes: matrices are [in, ..., out]."""
    rng, head = np.random.default_rng(0), EMBED // HEADS
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
    zeros = lambda *shape: np.zeros(shape, np.float32)
    norm = lambda *shape: {"scale": np.ones(shape, np.float32), "bias": zeros(*shape)}
    blocks = {
        "norm1": norm(LAYERS, EMBED),
        "attention": {
            "qkv": normal(LAYERS, EMBED, 3, HEADS, head),
            "qkv_bias": zeros(LAYERS, 3, HEADS, head),
            "out": normal(LAYERS, HEADS, head, EMBED),
            "out_bias": zeros(LAYERS, EMBED),
        },
        "norm2": norm(LAYERS, EMBED),
        "mlp": {
            "up": normal(LAYERS, EMBED, 4 * EMBED),
            "up_bias": zeros(LAYERS, 4 * EMBED),
            "down": normal(LAYERS, 4 * EMBED, EMBED),
            "down_bias": zeros(LAYERS, EMBED),
        },
    }
    return {
        "table": normal(VOCAB, EMBED),
        "positions": normal(SEQUENCE, EMBED),
        "blocks": blocks,
        "norm": norm(EMBED),
    }


def batch() -> tuple[np.ndarray, np.ndarray]:
    """(tokens, labels), [ROWS, SEQUENCE] each."""
    text = np.random.default_rng(1).integers(0, VOCAB, (ROWS, SEQUENCE + 1), dtype=np.int32)
    return text[:, :-1].copy(), text[:, 1:].copy()


def serve(step: Callable[[], float], matmul: Callable[[np.ndarray, np.ndarray], Callable[[], None]], **about) -> None:
    """Answer the driver. `step` takes one optimizer step, waits for it and returns its loss; `matmul` takes two
    matrices and returns what multiplies them once."""
    say = lambda **answer: print(json.dumps(answer), flush=True)
    say(**about, rss=_peak_rss())
    for line in sys.stdin:
        command, _, number = line.strip().partition(" ")
        if command == "quit":
            return
        if command == "matmul":
            say(gflops_per_second=_rate(matmul))
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        losses = [step() for _ in range(int(number))]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        say(wall=wall / len(losses), cpu=cpu / len(losses), losses=losses, rss=_peak_rss())


def _rate(matmul) -> float:
    """1e9 floating-point operations per second over `SHAPES`, the best of 5 turns each."""
    seconds = 0.0
    for m, k, n in SHAPES:
        multiply, turns = matmul(np.ones((m, k), np.float32), np.ones((k, n), np.float32)), []
        for _ in range(7):
            start = time.perf_counter()
            multiply()
            turns.append(time.perf_counter() - start)
        seconds += min(turns[2:])
    return sum(2 * m * k * n for m, k, n in SHAPES) / seconds / 1e9


def _peak_rss() -> int:
    """Most bytes of memory this process has held (Linux)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
