"""Contents of data files, and how the tests open them."""

import json

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxdist.config import DataConfig
from jaxdist.data.corpus import Corpus, open_corpus
from jaxdist.data.progress import unseen

VOCAB, S = 300, 16
POEM = "".join(f"line {i}: the tide of {i * i} äöü 日本 \t🙂 comes and goes\n" for i in range(400))


def lines(*texts: str) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def ids(*numbers: int) -> bytes:
    return np.array(numbers, "<u2").tobytes()


def open_(
    vocab: int = VOCAB, sequence: int = S, apart: bool = False, progress=unseen, begun: str | None = None, **knobs
) -> Corpus:
    return open_corpus(DataConfig(**knobs), vocab, sequence, apart, progress, begun)


def save_tokenizer(path, size=VOCAB, end=None):
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size - 1)} | {"?": size - 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(5)
    if end:
        tokenizer.add_special_tokens([end])
    tokenizer.save(str(path))
    return path


def save_pictures(folder, pictures: dict[str, np.ndarray], **how):
    """uint8 arrays [H, W] or [H, W, 3] as image files below `folder`, by their names."""
    from PIL import Image

    for name, pixels in pictures.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / name, **how)
    return folder
