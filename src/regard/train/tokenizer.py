"""A tokenizer learned from a corpus: its bytes, its characters, or byte pairs. It is the loaders' own class and file."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..models.tokenizer import EACH, Specials, Tokenizer, TokenizerError, byte_characters, subwords

END = "<|end|>"
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
"""A conversation as text that goes on line by line: all that a model of plain text can make of one."""


def learn(kind: str, texts: Iterable[str], vocabulary: int = 4096) -> Tokenizer:
    """A tokenizer of this kind for these texts. END closes a document; where there is none, documents are joined by a line break."""
    if kind not in ("byte", "char", "bpe"):
        raise TokenizerError(f"a tokenizer {kind!r} cannot be learned; byte, char and bpe can")
    t = _tokenizers()
    if kind == "char":
        found = {"\n"}
        for text in texts:
            found |= set(text)
        inner = t.Tokenizer(t.models.WordLevel({c: i for i, c in enumerate(sorted(found))}, unk_token=END))
        inner.pre_tokenizer = t.pre_tokenizers.Split(t.Regex(EACH), "isolated")
        inner.decoder = t.decoders.Fuse()
        return Tokenizer(subwords(inner), template=TEMPLATE)
    inner = t.Tokenizer(t.models.BPE(vocab={c: i for i, c in enumerate(byte_characters())}, merges=[]))
    inner.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "bpe")
    inner.decoder = t.decoders.ByteLevel()
    if kind == "byte":
        inner.add_special_tokens([END])
    else:
        # All 256 bytes, seen or not, so that no later text is unknown.
        alphabet = t.pre_tokenizers.ByteLevel.alphabet()
        trainer = t.trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
    return Tokenizer(subwords(inner), Specials(eos=inner.token_to_id(END)), TEMPLATE)


def closed(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    """A document's tokens with what closes it."""
    end = tokenizer.special.eos
    return [*tokens, *(tokenizer.encode("\n", bos=False) if end is None else [end])]


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise TokenizerError("training needs the package tokenizers: pip install 'regard[train]'") from error
    return tokenizers
