"""POST /v1/embeddings: sentence vectors of MiniLM, where it is among the models of this machine."""

from __future__ import annotations

import base64
import struct
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

import torch
from fastapi import APIRouter
from fastapi.responses import JSONResponse

from ...identity.read.finding import ENCODER
from ...models import downloads, mean_pooled
from ...models.base import Model
from ...models.tokenizer import Tokenizer
from ..access import READ, SERVICE
from ..errors import ApiError, refuse
from ..keys import Caller
from ..schema import EmbeddingRequest
from ..service import Service

router = APIRouter(tags=["openai"])
_LOADING = threading.Lock()


@router.post("/v1/embeddings", response_model=None)
async def embeddings(body: EmbeddingRequest, service: Service = SERVICE, caller: Caller = READ) -> JSONResponse:
    """A vector for each input; texts, or token ids of the encoder itself."""
    if not downloads.present(ENCODER):
        raise ApiError(
            404, f"no sentence encoder is here; whoever runs this server gets one with: regard models get {ENCODER}",
            code="encoder_not_installed", param="model",
        )  # fmt: skip
    if body.model not in (None, ENCODER):
        raise ApiError(404, f"there is no embedding model {body.model!r:.80} here; there is {ENCODER}", code="model_not_found", param="model")  # fmt: skip
    rows = inputs_of(service, body.input)
    vectors, count = await service.reading(lambda: _vectors(rows))
    if body.dimensions not in (None, len(vectors[0])):
        raise refuse("dimensions", f"{ENCODER} has {len(vectors[0])} and no other", "invalid_value")
    form = _base64 if body.encoding_format == "base64" else list[float]
    data = [{"object": "embedding", "index": i, "embedding": form(v)} for i, v in enumerate(vectors)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": ENCODER, "usage": usage}, headers=body.warning())


def inputs_of(service: Service, given: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]) -> list[str | list[int]]:
    """Texts or token ids, one row each."""
    if isinstance(given, str):
        rows: list[str | list[int]] = [given]
    elif given and isinstance(given[0], int):
        rows = [cast(list[int], given)]
    else:
        rows = cast(list[str | list[int]], list(given))
    if not 0 < len(rows) <= service.settings.prompts:
        raise refuse("input", f"{len(rows)} inputs; 1 to {service.settings.prompts} at a time", "invalid_value")
    if any(not len(row) for row in rows):
        raise refuse("input", "an empty text has no meaning to give a vector of", "invalid_value")
    return rows


@lru_cache(maxsize=1)
def _opened() -> tuple[Model, Tokenizer]:
    return downloads.open_model(ENCODER)


@torch.no_grad()
def _vectors(rows: Sequence[str | list[int]]) -> tuple[list[list[float]], int]:
    with _LOADING:
        model, tokenizer = _opened()
    vocabulary, most = int(model.config.vocabulary), int(model.context or 512)
    vectors, count = list[list[float]](), 0
    for row in rows:
        ids = tokenizer.encode(row, framed=True) if isinstance(row, str) else row
        if any(i >= vocabulary for i in ids):
            raise refuse(
                "input", f"token ids are {ENCODER}'s own, below {vocabulary}; send text (LangChain: check_embedding_ctx_length=False)",
                "invalid_value",
            )  # fmt: skip
        if len(ids) > most:
            raise refuse("input", f"{len(ids):,} tokens; {ENCODER} reads {most}", "context_length_exceeded")
        count += len(ids)
        vectors.append(mean_pooled(model(torch.tensor([ids])).last)[0].tolist())
    return vectors, count


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")
