"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them and lm-eval's remote tokenizer asks for them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ...errors import CheckpointError
from ..access import READ, SERVICE
from ..asking import chat_of
from ..errors import ApiError, refuse
from ..keys import Caller
from ..schema import DetokenizeRequest, TokenizeRequest
from ..service import Service
from ..wire import Words

router = APIRouter(tags=["tokens"])


@router.post("/tokenize")
def tokenize(body: TokenizeRequest, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """The token ids of a text, or of messages as the chat template writes them."""
    if (body.prompt is None) == (body.messages is None):
        raise refuse("prompt", "give a prompt or messages, and not both", "invalid_value")
    tokenizer = service.tokenizer
    if body.messages is not None:
        try:
            text = tokenizer.chat(chat_of(service, body.messages), add_generation_prompt=body.add_generation_prompt)
        except CheckpointError as error:
            raise ApiError(400, str(error), code="invalid_messages", param="messages") from error
        tokens = tokenizer.encode(text, bos=body.add_special_tokens)
    else:
        tokens = tokenizer.encode(str(body.prompt), bos=None if body.add_special_tokens is not False else False)
    words = Words(tokenizer)
    strings = [words.text(t) for t in tokens] if body.return_token_strs else None
    return {"count": len(tokens), "max_model_len": service.model.context, "tokens": tokens, "token_strs": strings}


@router.post("/detokenize")
def detokenize(body: DetokenizeRequest, service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """The text of token ids."""
    vocabulary: int = service.model.config.vocabulary
    bad = next((t for t in body.tokens if t >= vocabulary), None)
    if bad is not None:
        raise refuse("tokens", f"{bad} is no token; this model knows 0 to {vocabulary - 1}", "invalid_value")
    return {"prompt": service.tokenizer.decode(body.tokens, special=True)}


@router.get("/tokenizer_info")
def tokenizer_info(service: Service = SERVICE, caller: Caller = READ) -> dict[str, Any]:
    """Its special tokens and its chat template."""
    t = service.tokenizer
    names = {"bos_token": t.special.bos, "eos_token": t.special.eos, "pad_token": t.special.pad, "unk_token": t.special.unknown}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name: t.text_of(i) if i is not None else None for name, i in names.items()},
        "add_bos_token": t.special.add_bos,
        "chat_template": t.template,
        "vocab_size": t.size,
        "model_max_length": service.model.context,
    }
