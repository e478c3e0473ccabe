"""What is counted of conversations while they are tokenized, and told of them in the summary of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxdist.data.readers.reader import Document
from jaxdist.output.units import counted

if TYPE_CHECKING:
    from jaxdist.data.chats.learned_tokens import LearnedTokens

KEPT = "chats"
"""The fact of the cache that has it."""


def counts_of(document: Document, rows: list[LearnedTokens]) -> dict[str, int]:
    """Return what is counted of a conversation."""
    return {
        "conversations": 1,
        "rows": len(rows),
        "tokens": sum(row.ids.size for row in rows),
        "learned": sum(int(row.learned[1:].sum()) for row in rows),
        "pairs": int(document.pair),
        "divided": int(len(rows) > 1 and not document.pair),
        "thinking_off": int(document.rows[0].thinks is False),
        "thinking_on": int(document.rows[0].thinks is True),
        "forged": int(document.forged),
        "uncalled": int(document.uncalled),
        "continued": int(document.continued),
    }


def facts(parts: Iterable[Mapping[str, int] | None]) -> dict[str, Any]:
    """Return for the cache what was counted in all parts of the data; nothing of texts."""
    total: dict[str, int] = {}
    for part in parts:
        for name, count in (part or {}).items():
            total[name] = total.get(name, 0) + count
    return {KEPT: total} if total else {}


def describe(facts: Mapping[str, Any]) -> list[str]:
    """Return phrases about conversations, if the data are such: what is learned of them, and what became of them."""
    return phrases_of(facts[KEPT]) if KEPT in facts else []


def holds_pairs(facts: Mapping[str, Any]) -> bool:
    """Return whether the rows of the data are pairs of answers."""
    return bool(facts.get(KEPT, {}).get("pairs"))


def thinking(facts: Mapping[str, Any]) -> bool | None:
    """Return the `enable_thinking` with which most conversations were written; None for the template's default."""
    found = facts.get(KEPT, {})
    off, on = found.get("thinking_off", 0), found.get("thinking_on", 0)
    if max(off, on) * 2 <= found.get("conversations", 0):
        return None
    return on > off


def holds_texts(facts: Mapping[str, Any]) -> bool:
    """Return whether most conversations are texts that no template has written."""
    found = facts.get(KEPT, {})
    return bool(2 * found.get("continued", 0) > found.get("conversations", 0))


def phrases_of(found: Mapping[str, int]) -> list[str]:
    """Return the same of what was counted."""
    phrases = [f"{100 * found['learned'] / max(1, found['tokens']):.1f} % of the tokens are learned"]
    if found["divided"]:
        phrases.append(
            f"{counted(found['divided'], 'conversation')} cut into one row an answer, as the template changes earlier "
            f"turns ({found['rows']:,} rows in all)"
        )
    for way in ("off", "on"):
        if found[f"thinking_{way}"]:
            phrases.append(f"{found[f'thinking_{way}']:,} written with enable_thinking {way}")
    if found["forged"]:
        phrases.append(f"{found['forged']:,} with special tokens in texts of others than the assistant")
    # Of what was counted by an earlier version the rest is not known.
    if found.get("continued"):
        phrases.append(f"{found['continued']:,} as texts, without a chat template")
    if found.get("uncalled"):
        phrases.append(
            f"{found['uncalled']:,} whose calls of tools the template leaves out, so that they are not learned"
        )
    return phrases
