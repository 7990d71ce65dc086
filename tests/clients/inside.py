"""The same numbers without a server: what clients were told is compared with what the model says in a process of its own.

.venv/bin/python tests/clients/inside.py scores MODEL < pairs.json        [[context, continuation], …] → [log-likelihood, …]
"""

from __future__ import annotations

import json
import sys

import torch

from regard.models.decode.generate import logits_of
from regard.models.downloads import open_model


def scores(model_name: str) -> list[float]:
    model, tokenizer = open_model(model_name)
    found: list[float] = []
    for context, continuation in json.load(sys.stdin):
        before = tokenizer.encode(context, bos=False)
        whole = tokenizer.encode(context + continuation, bos=False)
        rates = torch.log_softmax(logits_of(model, whole), -1)
        found.append(sum(float(rates[i - 1, whole[i]]) for i in range(len(before), len(whole))))
    return found


if __name__ == "__main__":
    with torch.no_grad():
        print(json.dumps({"scores": scores}[sys.argv[1]](*sys.argv[2:])))
