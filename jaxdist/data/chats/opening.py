"""Give conversations the chat template that they are learned with: that of the tokenizer which the request names."""

from __future__ import annotations

from dataclasses import replace

from jaxdist.config import DataConfig, RequestError
from jaxdist.data.chats.rendering import VERSION, Renderer
from jaxdist.data.sources import Source, Sources
from jaxdist.files import digest
from jaxdist.huggingface.chat_template import ChatText, find_chat_template, folder_of
from jaxdist.huggingface.given_tokenizer import GivenTokenizer
from jaxdist.huggingface.special_tokens import SpecialTokens


def with_template(sources: Sources, config: DataConfig, given: GivenTokenizer | None) -> Sources:
    """Return conversations with what they are rendered with. Raises `RequestError` where there is no chat template."""
    kinds = {source.chats is not None for source in sources.all}
    if len(kinds) > 1:
        chats, texts = sorted(sources.all, key=lambda source: source.chats is None)
        raise RequestError(
            f"'{chats.name}' holds conversations and '{texts.name}' text, and one is to validate the other; give both "
            "in the same form, or say it by data.form"
        )
    if given is None or config.tokenizer is None:
        raise RequestError(
            f"'{sources.name}' holds conversations, which are learned as a chat template writes them; give the folder "
            "of a tokenizer that has one as data.tokenizer, or, if its rows are texts, name their key by data.text"
        )
    folder = folder_of(config.tokenizer)
    found = find_chat_template(folder)
    if found:
        # Whatever is wrong with the template is said before anything is read.
        found.compiled()
    elif any(source.chats and not source.chats.may_be_texts for source in sources.all):
        raise RequestError(
            f"'{sources.name}' holds conversations, and '{folder}' has no chat template to write them with (a "
            "chat_template.jinja, or chat_template in its tokenizer_config.json); copy it there"
        )
    renderer = renderer_of(found or ChatText("", folder, {}), given, config)
    held_out = _with(sources.held_out, renderer) if sources.held_out else None
    return replace(sources, training=_with(sources.training, renderer), held_out=held_out)


def check_form(sources: Sources, pairs: bool) -> None:
    """Raise `RequestError` for pairs of answers that nothing learns, or where these are wanted and something else is.

    `pairs` says whether pairs are learned.
    """
    for source in sources.all:
        holds = source.chats is not None and source.chats.pairs
        if holds and not pairs:
            raise RequestError(
                f"'{source.name}' holds pairs of a better and a worse answer (chosen, rejected); set train.objective "
                "to dpo or orpo to learn them, write the better ones as messages, or name one key by data.text"
            )
        if pairs and not holds:
            others = "conversations" if source.chats else "text or tokens"
            raise RequestError(
                f"train.objective dpo or orpo learns pairs of answers (chosen, rejected), but '{source.name}' holds "
                f"{others}; give such pairs, or set train.objective to cross-entropy"
            )


def renderer_of(template: ChatText, given: GivenTokenizer, config: DataConfig) -> Renderer:
    """Return what conversations are rendered with."""
    tokenizer = given.load()
    special = tuple(token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special)
    ends = (given.special.bos, given.special.eos)
    begin, end = ("" if token is None else str(tokenizer.id_to_token(token)) for token in ends)
    # The tokenizer may have an end-of-text token that no other file names.
    names = tuple(sorted(template.names.items()))
    return Renderer(template.jinja, str(template.folder), names, special, begin, end, config.learn)


def stopping(given: GivenTokenizer, renderer: Renderer) -> SpecialTokens:
    """Return the special tokens of a tokenizer, where a text also ends as the conversations to learn from do.

    What the template ends an answer with need not be the end of text that the tokenizer and the model's files name.
    """
    tokenizer = given.load()
    ends = [tokenizer.token_to_id(text) for text in (renderer.end_of_answers(), renderer.end) if text]
    new = [end for end in dict.fromkeys(ends) if end is not None and end not in given.special.stops]
    return given.special._replace(stops=(*given.special.stops, *new))


def identity(sources: Sources) -> list[str]:
    """Return what names how conversations become tokens, beside their content and the tokenizer; nothing of texts."""
    chats = sources.training.chats
    if chats is None:
        return []
    assert chats.renderer, "conversations without a template"
    # Where the folder lies does not change them.
    return [digest("chats", VERSION, *(str(value) for value in chats.renderer._replace(folder="")))]


def _with(source: Source, renderer: Renderer) -> Source:
    assert source.chats
    return replace(source, chats=source.chats._replace(renderer=renderer))
