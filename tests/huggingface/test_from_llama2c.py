"""`scripts/from_llama2c.py`: a model that is written here as llama2.c's export.py writes it, and run as run.c does."""

from __future__ import annotations

import importlib.util
import itertools
import struct
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxdist import generate
from jaxdist.request import load
from tests.huggingface.golden import logits

SCRIPT = Path(__file__).parents[2] / "scripts" / "from_llama2c.py"

D, F, L, N, K, S = 32, 48, 2, 4, 2, 24
H = D // N
PIECES = ["▁t", "he", "▁the", "▁a", "in", "ing", "▁m", "es", "mes", "▁mes", "▁mesh", "▁l", "os", "oss", "▁loss", "é"]
LETTERS = "▁abcdefghilmnoprstuw.éT"
VOCAB = 3 + 256 + len(PIECES) + len(LETTERS)

TEXTS = ["", "the loss", "The mesh is a thing.", "ing ing  the", "mesh\nmesh", "café 日本", "mmeshes", " a"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("from_llama2c", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def entries() -> list[tuple[str, float]]:
    """What tokenizer.py makes of a sentencepiece model: bytes have no score, pieces come by rank, letters come last."""
    found = [("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0), *((f"<0x{byte:02X}>", 0.0) for byte in range(256))]
    texts = [*PIECES, *(letter for letter in LETTERS)]
    assert len({*texts}) == len(texts) - 1, "é is among both"
    texts[PIECES.index("é")] = "▁é"
    return [*found, *((text.replace("▁", " "), -float(rank)) for rank, text in enumerate(texts))]


def random_model(tied: bool) -> dict[str, np.ndarray]:
    """Weights as legacy_export writes them, in its order."""
    rng = np.random.default_rng(0)
    width = K * H
    shapes = {
        "table": (VOCAB, D), "norm1": (L, D), "q": (L, D, D), "k": (L, width, D), "v": (L, width, D), "o": (L, D, D),
        "norm2": (L, D), "w1": (L, F, D), "w2": (L, D, F), "w3": (L, F, D), "norm": (D,),
    }  # fmt: skip
    weights = {name: rng.normal(size=shape).astype(np.float32) * np.float32(0.3) for name, shape in shapes.items()}
    angles = np.arange(S)[:, None] * 1e4 ** (-np.arange(0, H, 2) / H)
    weights["cos"], weights["sin"] = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    if not tied:
        weights["output"] = rng.normal(size=(VOCAB, D)).astype(np.float32)
        # So that what is generated can be read.
        weights["output"][:259] *= 0.1
    return weights


def write(folder: Path, weights: dict[str, np.ndarray]) -> tuple[Path, Path]:
    model, tokenizer = folder / "model.bin", folder / "tokenizer.bin"
    vocab = -VOCAB if "output" in weights else VOCAB
    model.write_bytes(
        struct.pack("<7i", D, F, L, N, K, vocab, S) + b"".join(weight.tobytes() for weight in weights.values())
    )
    encoded = [(text.encode(), score) for text, score in entries()]
    content = [struct.pack("<i", max(len(text) for text, _ in encoded))]
    content += [struct.pack("<fi", score, len(text)) + text for text, score in encoded]
    tokenizer.write_bytes(b"".join(content))
    return model, tokenizer


def forward(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """run.c's `forward` for all positions at once: neighbours are turned as pairs."""

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * scale

    def turned(x: np.ndarray) -> np.ndarray:
        a, b = x[..., ::2], x[..., 1::2]
        cos, sin = (weights[name][: len(x), None] for name in ("cos", "sin"))
        return np.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)

    x = weights["table"][tokens]
    hidden = np.triu(np.full((len(tokens),) * 2, -np.inf), 1)
    for layer in range(L):
        of = {name: weight[layer] for name, weight in weights.items() if weight.ndim > 1 and len(weight) == L}
        y = norm(x, of["norm1"])
        q, k, v = (np.reshape(y @ of[name].T, (len(y), -1, H)) for name in "qkv")
        q, k = turned(q), turned(k)
        k, v = (np.repeat(a, N // K, 1) for a in (k, v))
        scores = np.einsum("snh,tnh->nst", q, k) / np.sqrt(H) + hidden
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        x = x + np.einsum("nst,tnh->snh", p, v).reshape(len(y), -1) @ of["o"].T
        y = norm(x, of["norm2"])
        gate = y @ of["w1"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ of["w3"].T)) @ of["w2"].T
    return norm(x, weights["norm"]) @ weights.get("output", weights["table"]).T


def encode(text: str) -> list[int]:
    """run.c's `encode`: a space before the text, letters or their bytes, then unions by their scores."""
    known = entries()
    ids = {piece: number for number, (piece, _) in enumerate(known)}
    tokens = [1]
    for letter in f" {text}" if text else "":
        tokens += [ids[letter]] if letter in ids else [byte + 3 for byte in letter.encode()]
    while True:
        unions = [ids.get(known[a][0] + known[b][0]) for a, b in itertools.pairwise(tokens)]
        best = max((known[union][1], -at) for at, union in enumerate(unions) if union) if any(unions) else None
        if best is None:
            return tokens
        at = -best[1]
        tokens[at : at + 2] = [unions[at]]


@pytest.fixture(scope="module")
def folder(script, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama2c")
    sizes = script.convert(*write(path, random_model(tied=False)), path / "out")
    assert sizes == (D, F, L, N, K, -VOCAB, S)
    return path / "out"


def test_logits_are_those_of_llama2c(folder):
    config = load(None, {"init_from": str(folder), "model.sequence": "16"})
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 16), dtype=np.int32)
    ours = logits(config, tokens)
    theirs = np.stack([forward(random_model(tied=False), row) for row in tokens])
    assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_ids_of_llama2c(folder, text):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(text).ids == encode(text)
    assert tokenizer.decode(encode(text)) == text


@pytest.mark.slow
def test_the_folder_generates_what_llama2c_does(folder, capsys):
    assert generate.main([str(folder), "--prompt", "the loss", "--tokens", "6", "--temperature", "0"]) == 0
    tokens = encode("the loss")
    for _ in range(6):
        tokens.append(int(np.argmax(forward(random_model(tied=False), np.array(tokens))[-1])))
    wanted = Tokenizer.from_file(str(folder / "tokenizer.json")).decode(tokens)
    assert wanted in capsys.readouterr().out


def test_a_tied_model_is_tied(script, tmp_path):
    script.convert(*write(tmp_path, random_model(tied=True)), tmp_path / "out")
    assert load(None, {"init_from": str(tmp_path / "out")}).model.tied


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: struct.pack("<2i", 0x616B3432, 2) + content, "is of version 2, and version 0 is read"),
        (lambda content: content[:-4], "numbers, and Sizes"),
        (lambda content: content[:9], "has 9 bytes"),
        (lambda content: b"\0" * 28 + content, "is no model of llama2.c"),
    ],
)
def test_a_file_of_another_form_is_refused(script, tmp_path, change, said):
    model, tokenizer = write(tmp_path, random_model(tied=True))
    model.write_bytes(change(model.read_bytes()))
    with pytest.raises(SystemExit, match=said):
        script.convert(model, tokenizer, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("size", "said"), [(-1, "has no"), (5000, "more than")])
def test_a_tokenizer_of_another_model_is_refused(script, tmp_path, size, said):
    model, tokenizer = write(tmp_path, random_model(tied=True))
    content = tokenizer.read_bytes()
    tokenizer.write_bytes(content[:size] if size < 0 else content + b"\0" * size)
    with pytest.raises(SystemExit, match=said):
        script.convert(model, tokenizer, tmp_path / "out")
