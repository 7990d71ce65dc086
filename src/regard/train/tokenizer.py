"""A tokenizer learned from a corpus: its bytes, its characters, or byte pairs. It is the loaders' own class and file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..models.byte_level import byte_characters
from ..models.objectives import END, MASK, PAD
from ..models.tokenizer import EACH, Specials, Tokenizer, TokenizerError, subwords

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Inner

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
"""A conversation as text that goes on line by line: all that a model of plain text can make of one."""


def learn(kind: str, texts: Iterable[str], vocabulary: int = 4096, special: Sequence[str] = ()) -> Tokenizer:
    """A tokenizer of this kind for these texts, with `special` tokens that are no text.

    END closes a document; characters have it only if it is among the special ones, and are joined by a line break otherwise.
    """
    if kind not in ("byte", "char", "bpe"):
        raise TokenizerError(f"a tokenizer {kind!r} cannot be learned; byte, char and bpe can")
    t = _tokenizers()
    if kind == "char":
        letters = {"\n"}
        for text in texts:
            letters |= set(text)
        inner = t.Tokenizer(t.models.WordLevel({c: i for i, c in enumerate(sorted(letters))}, unk_token=END))
        inner.pre_tokenizer = t.pre_tokenizers.Split(t.Regex(EACH), "isolated")
        inner.decoder = t.decoders.Fuse()
        inner.add_special_tokens(list(special))
        return _named(inner)
    inner = t.Tokenizer(t.models.BPE(vocab={c: i for i, c in enumerate(byte_characters())}, merges=[]))
    inner.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "bpe")
    inner.decoder = t.decoders.ByteLevel()
    names = list(dict.fromkeys([END, *special]))
    if kind == "byte":
        inner.add_special_tokens(names)
    else:
        # All 256 bytes, seen or not, so that no later text is unknown.
        alphabet = t.pre_tokenizers.ByteLevel.alphabet()
        trainer = t.trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=names, initial_alphabet=alphabet, show_progress=False
        )
        inner.train_from_iterator(texts, trainer)
    return _named(inner)


def _named(inner: Inner) -> Tokenizer:
    """A tokenizer that knows its special tokens by what they are for."""
    eos, pad, mask = (inner.token_to_id(name) for name in (END, PAD, MASK))
    return Tokenizer(subwords(inner), Specials(eos=eos, pad=pad, mask=mask), TEMPLATE)


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
