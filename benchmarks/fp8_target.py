"""Which matmuls of a step in fp8 are calls of cuBLASLt in fp8, in programs for GPUs that are not there.

    python benchmarks/fp8_target.py [--out RESULTS.txt]

The last row leaves out the compiler option of runs in fp8 (`cluster.xla_options.FLOAT8`), by giving XLA's own default.
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from pathlib import Path

from jaxdist.explain import explain
from jaxdist.request import load

ONE = {
    "mesh": "1x1x1",
    "parallel.zero": "0",
    "train.global_batch_size": "4",
    "model.remat": "block",
    "model.unroll_layers": "false",
}
ROWS = (("bfloat16", ""), ("fp8", ""), ("fp8", "--xla_gpu_enable_triton_gemm=true"))
CALL = re.compile(r'custom_call_target="(__cublas[\w$]+)"')
GIB = 2**30


def row(precision: str, flags: str) -> list[str]:
    """Compile a step of Llama 1B for an H100, and describe it in lines."""
    os.environ["XLA_FLAGS"] = flags
    program = explain(load("llama_1b", {**ONE, "precision": precision}), "h100").program
    calls = Counter(CALL.findall(program.text))
    numbers = Counter(re.findall(r"= \(?(f8\w+)\[", program.text))
    return [
        f"llama_1b 1 x h100, precision {precision} {flags} (jax {program.jax})",
        f"    calls {dict(sorted(calls.items()))}; kernels of Triton {program.text.count('__triton')}",
        f"    values in fp8 {dict(sorted(numbers.items()))}; temporary {program.temporary_bytes / GIB:.2f} GiB",
    ]


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    lines = ["$ python benchmarks/fp8_target.py"]
    out = parser.parse_args().out
    for precision, flags in ROWS:
        lines += row(precision, flags)
        print("\n".join(lines), flush=True)
        if out:
            out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
