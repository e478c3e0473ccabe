"""The memory of a host stays the same while a long run reads its rows, from more files than may be open at a time."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxdist.data.number_file import MOST_OPEN
from tests.data.files import save_tokenizer
from tests.tiers import exhaustive

READ = """
import os, sys
import jaxdist.data
path, pack, tokenizer, batches = sys.argv[1:]
batches = int(batches)
rows = jaxdist.data.open(path, sequence=64, vocab=300, pack=pack, tokenizer=tokenizer)

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

told = []
for step in range(batches):
    rows.batch(step, 8, seed=1)
    if step in (batches // 10, batches // 2, batches - 1):
        told.append(resident())
print(*told)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="it asks Linux for the memory of a process")
@pytest.mark.parametrize(
    ("way", "batches"),
    [("mixture", 4_000), *exhaustive((way, 20_000) for way in ("mixture", "cut", "best-fit"))],
)
def test_many_batches_from_many_files_take_no_memory(tmp_path, way, batches):
    """Of 8 rows from 600 files: below 2 MB more than after a tenth of them."""
    random = np.random.default_rng(0)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for i in range(300):
            random.integers(0, 300, 1000).astype("<u2").tofile(tmp_path / folder / f"{i:04}.bin")
    assert MOST_OPEN < 600, "some are closed and opened again"
    path = f"{tmp_path}/a*0.7,{tmp_path}/b*0.3" if way == "mixture" else f"{tmp_path}/a,{tmp_path}/b"
    tokenizer = save_tokenizer(tmp_path / "tokenizer.json", end="<|endoftext|>", size=299)
    done = subprocess.run(
        [sys.executable, "-c", READ, path, "best-fit" if way == "best-fit" else "cut", tokenizer, str(batches)],
        check=True,
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    early, middle, last = map(int, done.stdout.split())
    print(f"{way}: {early / 1e6:.1f} MB after {batches // 10:,} batches, {last / 1e6:.1f} after {batches:,}")
    assert max(middle, last) - early < 2 << 20, f"{(last - early) / 2**20:.1f} MiB more"
