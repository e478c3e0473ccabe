"""Keep the tokens of a text in the cache: a folder of token files and their tokenizer, filled once for the same key."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from jaxdist.config import RequestError
from jaxdist.data.packed_rows import lengths_in_order
from jaxdist.data.progress import Pass, Progress
from jaxdist.data.row_use import usual_uses
from jaxdist.data.sources import Source, Sources, TextFile
from jaxdist.data.token_cache import Unfinished, empty, open_cache
from jaxdist.data.tokenizing.adopting import adopt
from jaxdist.data.tokenizing.encoder import PIECES, TOKENIZER, is_written
from jaxdist.data.tokenizing.pieces import ByteCount, Plan
from jaxdist.data.tokenizing.shards import TRAIN, VALIDATION, Shards, open_shards, take_up
from jaxdist.data.tokenizing.sharing import claim_cores, claimed, forget_claims, run_that_shares, wait_for_others
from jaxdist.data.tokenizing.workers import core_count, write_pieces
from jaxdist.data.tokens import Tokens, TokenType
from jaxdist.files import WRONG_CONTENT, checksum, sweep_temporaries, write_whole
from jaxdist.files.caches import cache_folder
from jaxdist.files.json_files import LARGEST_LISTING, read_text
from jaxdist.huggingface.given_tokenizer import GivenTokenizer, load_tokenizer
from jaxdist.huggingface.special_tokens import special_tokens_of

ENTROPY = "entropy"
"""The fact that is the unigram entropy of the tokens that are held out."""


class Store(NamedTuple):
    """Tokens in the cache."""

    train: Tokens
    validation: Tokens
    used: GivenTokenizer
    """The tokenizer that made them."""
    content: str
    """The hash of the text."""
    facts: dict[str, Any]
    """The fields of `shards.Written`, the entropy, the bytes of the text if they were counted, and the rows that were
    skipped."""

    @property
    def note(self) -> str | None:
        """A sentence about documents that have their own delimiters, if there are any."""
        own = self.facts["own"]
        return self.used.special.own_note(self.used.load(), own, "document", ends=True) if own else None


def open_store(
    text: Source | Sources,
    key: Callable[[str], str],
    vocab: int,
    given: GivenTokenizer | None,
    progress: Progress,
    train: Callable[[], str] | None = None,
    counted: ByteCount = "",
    doubled: bool = False,
) -> Store:
    """Return the tokens of a text, after tokenizing it if the cache lacks them.

    A `Source` by itself is held out as a whole. `key` returns 64 hexadecimal digits, made from the hash of the text,
    that name all that determines the tokens. Where no tokenizer is given, `train` makes one and returns it as JSON. If
    `counted`, the bytes of the text are among the facts. `doubled` is explained in `Plan`. Raises `RequestError` if the
    text changes meanwhile.
    """
    # Taken first: the content must not change from here on.
    stamp = text.stamp()
    contents = text.contents(Pass(progress, "reading the data", text.size).read)
    content = text.digest(contents=contents)
    marked = any(source.chats for source in text.all)
    dtype: TokenType = "uint32" if marked else token_type(vocab)
    fraction = text.by_number if isinstance(text, Sources) else 0.0

    def fill(new: Path) -> dict[str, Any]:
        """Tokenize the text, or continue with what a killed process has left in `new`."""
        files = text.texts()
        plan = _begun(new, files)
        if plan is None:
            if given:
                made = given.text
            else:
                assert train, "no tokenizer is there, and none can be made"
                made = train()
            write_whole(new / TOKENIZER, made, lasting=True)
            special = (given or kept_tokenizer(new)).special
            made_of = checksum(new / TOKENIZER)
            plan = Plan.of(files, dtype, special, doubled, counted, made_of, contents, fraction)
            (new / PIECES).mkdir()
            adopt(new, plan)
        plan = replace(plan, run=run_that_shares())
        plan.write(new)
        (new / PIECES).mkdir(exist_ok=True)
        encoding = Pass(progress, "tokenizing", text.size)
        try:
            facts = _tokenize(new, plan, (given or kept_tokenizer(new)).load(), fraction, encoding)
        except RequestError as error:
            if text.stamp() != stamp:
                raise
            # What is finished is of use when the text is mended.
            raise Unfinished(*error.problems) from error
        if plan.special.delimits():
            facts |= usual_uses(lengths_in_order(open_shards(new, TRAIN, dtype, marked), plan.special, progress))
        if text.stamp() != stamp:
            raise RequestError(f"'{text.name}' changed while it was read; start again when it is complete")
        return facts

    folder = cache_folder() / key(content)
    facts = open_cache(folder, fill, progress)
    train_tokens, validation = (open_shards(folder, kind, dtype, marked) for kind in (TRAIN, VALIDATION))
    # Earlier versions did not count it.
    validation = replace(validation, entropy=facts.get(ENTROPY))
    return Store(train_tokens, validation, given or kept_tokenizer(folder), content, facts)


def _begun(folder: Path, files: Sequence[TextFile]) -> Plan | None:
    """Take up what a killed process has left in `folder`, and return its plan, for the same text in `files`.

    If anything is not as it was written, removes that; without a plan, everything, and returns None.
    """
    try:
        plan = Plan.read(folder).same_text(files)
        if checksum(folder / TOKENIZER) != plan.tokenizer:
            raise ValueError(f"{TOKENIZER} differs")
        sweep_temporaries(folder)
        sweep_temporaries(folder / PIECES)
        take_up(folder, plan)
        forget_claims(folder)
        return plan
    except (*WRONG_CONTENT, IndexError):
        # The folder may hold anything: whatever is wrong with it, the work starts over.
        empty(folder)
        return None


def _tokenize(folder: Path, plan: Plan, tokenizer: Tokenizer, fraction: float, encoding: Pass) -> dict[str, Any]:
    """Write the pieces that are missing, and return the facts of all."""
    shards = Shards(folder, plan, fraction)
    missing = []
    done = 0
    for piece in range(len(plan.pieces)):
        if is_written(folder, piece):
            done += plan.bytes_of(piece)
        else:
            missing.append(piece)
    if done:
        encoding.read(done)
    shards.advance()
    write_own = partial(write_pieces, folder, plan, tokenizer, reading=encoding, after_each=shards.advance)
    if plan.run and len(missing) > 1:
        claim_cores(folder)
        own: list[int] = []
        write_own(pieces=_noted(claimed(folder, missing), own), workers=min(core_count(), len(missing)))
        others = sorted(set(missing).difference(own))
        missing = wait_for_others(folder, plan, others, encoding, shards.advance)
    write_own(pieces=missing, workers=min(core_count(), len(missing)))
    whole = shards.advance()
    assert whole, "a piece is missing"
    written, size = shards.finish()
    facts = {**written._asdict(), **({"bytes": size} if plan.counted else {}), **shards.left_out, **shards.chats}
    return {**facts, ENTROPY: open_shards(folder, VALIDATION, plan.dtype, plan.marked).count_entropy()}


def _noted(pieces: Iterator[int], into: list[int]) -> Iterator[int]:
    """Yield the pieces, and note each."""
    for piece in pieces:
        into.append(piece)
        yield piece


def token_type(vocab: int) -> TokenType:
    """Return the dtype in which tokens of a vocabulary of that size are kept."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def kept_tokenizer(folder: Path) -> GivenTokenizer:
    """Return the tokenizer in a folder of the cache, which was made from the text itself."""
    text = read_text(folder / TOKENIZER, LARGEST_LISTING, links=False)
    return GivenTokenizer(text, special_tokens_of(load_tokenizer(text)))
