"""Tokenizing, beside the library alone and `datasets.map`. Rows and starts are measured by `data_rows.py`.

    python benchmarks/data.py [--datasets PYTHON] [--megabytes 100] [--rounds 2]

PYTHON is an interpreter that has datasets and tokenizers; this one needs neither datasets nor pyarrow. The text is
Python's standard library as JSON lines, a file a document, in a shuffled order and as often as it takes; the tokenizer
is a byte-level BPE of 32,768 entries that is trained on it. Each side is a process of its own, and they take turns: the
order of a round is that of the last one reversed. What is timed is the CPU of all threads and processes, which depends
less on other jobs on the machine than the clock: of the library its encoding alone, of the others everything from the
file on disk to tokens on disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

ENTRIES = 32_768
"""Of the tokenizer."""

SIDES = ("library alone", "jaxdist, threads", "jaxdist, processes", "datasets.map")


def cpu() -> float:
    """Return the CPU time of this process and of those that it has waited for, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def library_alone(folder: Path) -> tuple[float, int]:
    """Return the CPU seconds of encoding all texts in batches of a megabyte, and the number of tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = 0
    seconds = 0.0
    batch: list[str] = []
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").open()]
    for number, text in enumerate(texts):
        batch.append(text)
        if sum(map(len, batch)) >= 1 << 20 or number == len(texts) - 1:
            began = cpu()
            tokens += sum(len(one.ids) + 1 for one in tokenizer.encode_batch_fast(batch, add_special_tokens=False))
            seconds += cpu() - began
            batch = []
    return seconds, tokens


def jaxdist(folder: Path, processes: bool) -> tuple[float, int]:
    """Return the same of jaxdist, from the text to the tokens in the cache."""
    from jaxdist.config import DataConfig
    from jaxdist.data.progress import unseen
    from jaxdist.data.streams import Request
    from jaxdist.data.tokenizing import pieces

    # A piece is 64 MiB; here the text is one of them, or a few for each process.
    pieces.PIECE = (folder / "text.jsonl").stat().st_size // (6 if processes else 1) + 1
    with tempfile.TemporaryDirectory() as cache:
        os.environ["JAXDIST_CACHE"] = cache
        config = DataConfig(path=str(folder / "text.jsonl"), tokenizer=folder / "tokenizer.json")
        began = cpu()
        streams = Request.of(config, ENTRIES, unseen).open()
        return cpu() - began, streams.train.length + streams.validation.length


def datasets_map(folder: Path) -> tuple[float, int]:
    """Return the same of `datasets.map` with a process for each core, from the text to Arrow files."""
    from datasets import load_dataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"ids": [one.ids + [0] for one in tokenizer.encode_batch_fast(rows["text"], add_special_tokens=False)]}

    with tempfile.TemporaryDirectory() as cache:
        began = cpu()
        rows = load_dataset("json", data_files=str(folder / "text.jsonl"), split="train", cache_dir=cache)
        cores = len(os.sched_getaffinity(0))
        made = rows.map(encode, batched=True, num_proc=cores, remove_columns=["text"])
        seconds = cpu() - began
        return seconds, sum(len(ids) for ids in made["ids"])


def side(name: str, folder: Path) -> tuple[float, int]:
    """Return the CPU seconds and the tokens of a side."""
    if name == "library alone":
        return library_alone(folder)
    if name == "datasets.map":
        return datasets_map(folder)
    return jaxdist(folder, processes=name == "jaxdist, processes")


def write_text(folder: Path, megabytes: int) -> None:
    """Write the text and its tokenizer."""
    from jaxdist.data.readers.python_library import library_files, library_folder
    from jaxdist.data.readers.reader import Document
    from jaxdist.data.tokenizing.encoder import train_tokenizer

    texts = [path.read_text(errors="replace") for path in library_files(library_folder())]
    texts = [text for text in texts if text]
    shuffled = random.Random(0)
    with (folder / "text.jsonl").open("w") as file:
        while file.tell() < megabytes * 10**6:
            shuffled.shuffle(texts)
            for text in texts:
                file.write(json.dumps({"text": text}) + "\n")
                if file.tell() >= megabytes * 10**6:
                    break
    documents = ((False, Document(text, True)) for text in texts)
    made = train_tokenizer(documents, sum(map(len, texts)), ENTRIES)
    (folder / "tokenizer.json").write_text(made)


def tokenizing(megabytes: int, rounds: int, datasets: str | None) -> None:
    """Print the rates of all sides, and their ratios to the library alone in the same round."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_text(folder, megabytes)
        size = (folder / "text.jsonl").stat().st_size / 1e6
        sides = dict.fromkeys(SIDES, sys.executable)
        sides["datasets.map"] = datasets or ""
        found: dict[str, list[list[float]]] = {name: [] for name, interpreter in sides.items() if interpreter}
        for number in range(rounds):
            for name in list(found) if number % 2 == 0 else reversed(found):
                command = [sides[name], __file__, "--side", name, "--folder", place]
                found[name].append(json.loads(subprocess.check_output(command).splitlines()[-1]))
                print(f"round {number + 1}: {name:20} {found[name][-1][0]:8.2f} s of CPU", flush=True)
    print(f"tokenizing {size:.1f} MB, {rounds} rounds; MB per CPU second, and as a share of the library alone")
    for name, runs in found.items():
        rates = [size / seconds for seconds, _ in runs]
        ratios = [alone[0] / own[0] for alone, own in zip(found["library alone"], runs, strict=True)]
        tokens = {int(count) for _, count in runs}
        print(
            f"{name:20} {median(rates):5.2f}   {median(ratios):5.2f}   {min(ratios):.2f} to {max(ratios):.2f}   "
            f"{'the same' if tokens == {int(found['library alone'][0][1])} else tokens} tokens"
        )


def main() -> None:
    """Measure all sides, or one in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", metavar="PYTHON")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        print(json.dumps(side(asked.side, asked.folder)))
    else:
        cores = len(os.sched_getaffinity(0))
        print(f"Python {platform.python_version()}, {cores} cores, load {os.getloadavg()[0]:.1f}")
        tokenizing(asked.megabytes, asked.rounds, asked.datasets)
        print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
