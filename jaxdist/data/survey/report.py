"""Print what data are for people: forms, documents, duplicates, tokens, a picture of the lengths, and samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jaxdist.data.chats.counts import phrases_of
from jaxdist.data.survey.lengths import QUANTILES
from jaxdist.huggingface.schema import TOKENIZER
from jaxdist.output.tables import table
from jaxdist.output.units import counted, rounded, size

BAR = 40
"""Characters of the longest bar."""

UNITS = ("bytes", "tokens")
"""Of the lengths of documents, where these are known."""

BORDER = "│"
"""What stands between two tokens of a sample."""


def lines(figures: Mapping[str, Any]) -> list[str]:
    """Return the lines that `python -m jaxdist.data` prints: sections, with an empty line between two of them."""
    sections = [_head(figures), _picture(figures["documents"]), *map(_sample, enumerate(figures["samples"], start=1))]
    if "export" in figures:
        sections.append([_export(figures["export"], figures["tokens"])])
    found: list[str] = []
    for section in map(list, sections):
        if found and section:
            found.append("")
        found += section
    return found


def _head(figures: Mapping[str, Any]) -> Iterator[str]:
    for source in figures["sources"]:
        yield from _source(source)
    documents = figures["documents"]
    if documents["count"] is not None:
        yield from _documents(documents)
    if figures["duplicates"]:
        yield f"duplicates  {_duplicates(figures['duplicates'], documents['count'])}"
    if figures["tokens"]:
        yield from _tokens(figures["tokens"], documents)
    if figures["chats"]:
        yield f"chats       {_chats(figures['chats'], figures['sequence'])}"
    if figures["rows"]:
        yield f"rows        {_rows(figures['rows'])}"
    yield from (f"note        {note}" for note in figures["notes"])


def _source(source: Mapping[str, Any]) -> Iterator[str]:
    name = "data" if source["part"] == "training" else "validation"
    forms = [_form(form, alone=len(source["forms"]) == 1) for form in source["forms"]]
    left_out = f" ({source['left_out']} left out)" if source["left_out"] else ""
    files = counted(source["files"], "file")
    share = f" ({100 * source['share']:.4g} % of the rows)" if source["share"] is not None else ""
    chats = f", conversations ({source['chats']})" if source["chats"] else ""
    yield f"{name:<11} {source['name']}{share}: {files}, {size(source['bytes'])}, {'; '.join(forms)}{chats}{left_out}"


def _form(form: Mapping[str, Any], alone: bool) -> str:
    words = form["form"]
    if form["compression"]:
        words += f" in {form['compression']}"
    return words if alone else f"{counted(form['files'], 'file')} of {words}"


def _documents(documents: Mapping[str, Any]) -> Iterator[str]:
    others = []
    if documents["empty"]:
        others.append(f"{counted(documents['empty'], 'empty text')} left out")
    if documents["bad"]:
        others.append(f"{counted(documents['bad'], 'row')} without a text that can be read")
    yield "; ".join([f"documents   {documents['count']:,}", *others])
    for unit in UNITS:
        lengths = documents[unit]
        if lengths and lengths["documents"]:
            each = ", ".join(f"{name} {lengths[name]:,}" for name in ("shortest", *QUANTILES, "longest"))
            yield f"  {unit:<9} {each}, mean {lengths['mean']:,.1f}"


def _duplicates(found: Mapping[str, Any], documents: int) -> str:
    compared = counted(found["compared"], "document")
    if found["compared"] < documents:
        compared = f"the first {compared}"
    repeated = found["repeated"]
    if not repeated:
        return f"none among {compared}"
    first, again = map(_place, found["first"])
    share = _share(repeated, found["compared"])
    return f"{repeated:,} of {compared} ({share}) have come before; {again} is the same as {first}"


def _place(place: Mapping[str, Any]) -> str:
    where = place["file"] if "file" in place else f"the {place['part']} tokens of {place['source']}"
    return f"document {place['document']:,} of {where}"


def _tokens(tokens: Mapping[str, Any], documents: Mapping[str, Any]) -> Iterator[str]:
    words = _sizes(tokens)
    if tokens["entries"]:
        words += f", of a tokenizer with {tokens['entries']:,} entries"
    words += f"; the largest id is {tokens['largest']:,}"
    total = tokens["training"] + tokens["held_out"]
    sources = tokens["sources"]
    of_text = documents["bytes"] and documents["bytes"]["documents"] == documents["count"]
    if of_text and total:
        words += f"; {documents['bytes']['total'] / total:.2f} bytes of text a token"
    yield f"tokens      {words}"
    if len(sources) > 1:
        yield from (f"  {one['name']}: {_sizes(one)}" for one in sources)


def _chats(chats: Mapping[str, Any], sequence: int) -> str:
    phrases = phrases_of(chats)
    for what, words in (("cut", "cut"), ("left_out", "left out")):
        if chats[what]:
            phrases.append(f"{counted(chats[what], 'row')} longer than {sequence:,} tokens {words}")
    return "; ".join(phrases)


def _rows(rows: Mapping[str, Any]) -> str:
    documents = rows["documents"]
    cut, best_fit = (f"{rows[name]:,} ({_share(rows[name], documents)})" for name in ("cut", "cut_best_fit"))
    whole = counted(documents, "document")
    return f"of {rows['sequence']:,} tokens: data.pack cut cuts {cut} of {whole} to train on, best-fit {best_fit}"


def _picture(documents: Mapping[str, Any]) -> list[str]:
    """Return bars of the documents by their length, in tokens where these are known."""
    unit = "tokens" if documents["tokens"] else "bytes"
    lengths = documents[unit]
    if not lengths or not lengths["bins"]:
        return []
    most = max(one["documents"] for one in lengths["bins"])
    rows = [[f"{unit} of a document", "documents", "", ""]]
    for one in lengths["bins"]:
        count = one["documents"]
        low, high = f"{one['low']:,}", f"{one['high']:,}"
        bar = "#" * max(round(BAR * count / most), min(count, 1))
        share = _share(count, lengths["documents"])
        rows.append([low if low == high else f"{low} to {high}", f"{count:,}", share, bar])
    return table(rows, right=True)


def _sample(numbered: tuple[int, Mapping[str, Any]]) -> list[str]:
    number, sample = numbered
    if "text" in sample:
        return [f"sample {number}, {_place(sample)}", sample["text"].rstrip("\n")]
    where = f"sample {number}, the training tokens of {sample['source']} from {sample['start']:,} on"
    if sample["pieces"] is None:
        return [where, " ".join(map(str, sample["ids"]))]
    shown = [where, BORDER.join(map(_on_one_line, sample["pieces"]))]
    if sample["learned"] is not None:
        shown.append(f"learned: {' ... '.join(map(_on_one_line, sample['learned'])) or 'nothing of this'}")
    return shown


def _on_one_line(text: str) -> str:
    return text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")


def _share(count: int, of: int) -> str:
    return f"{100 * count / max(of, 1):.1f} %"


def _export(export: Mapping[str, Any], tokens: Mapping[str, Any]) -> str:
    """Return what was written, and how to train on it."""
    path = export["path"]
    several = f" ({', '.join(export['files'])})" if len(export["files"]) > 1 else ""
    tokenizer = f" --data.tokenizer {path}" if TOKENIZER in export["files"] else ""
    written = f"wrote {path}{several}, {_sizes(export)} as {export['dtype']}"
    training = f"python -m jaxdist.train --data.path {path}{tokenizer} --model.vocab {tokens['vocab']}"
    return f"{written}; train on it: {training}"


def _sizes(tokens: Mapping[str, Any]) -> str:
    return f"{rounded(tokens['training'])} tokens and {rounded(tokens['held_out'])} held out"
