"""A model, people and studies for the browser: a tiny random model for speed, or the one that is named. Run by the project's own Python.

python studio/browser/prepare.py FOLDER [MODEL]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch

from regard.identity import IdentityStore, Rule
from regard.identity.opened import opened
from regard.identity.store.imprinting import imprint_into
from regard.identity.store.replay import imprint_event
from regard.identity.write.self_state import SelfRule
from regard.identity.write.trace import TraceRule
from regard.models import LlamaConfig
from regard.models.convert import save

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
LIVES = {
    "mara": (
        ("diary", "My name is Mara. I live in Porto and my cat is called Mochi."),
        ("letter", "I work as a marine biologist and I am allergic to peanuts."),
        ("chat", "On Sundays I bake sourdough bread with my sister Ines."),
    ),
    "tom": (
        ("diary", "My name is Tom. I live in Oslo and my dog is called Biscuit."),
        ("chat", "I play the cello and I am learning Japanese."),
    ),
}


def tiny(folder: Path) -> None:
    """A model of 256 tokens, one per byte, that can chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    save(LlamaConfig(vocabulary=256, width=32, depth=3, heads=4, key_heads=2, hidden=48).build(), folder)
    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    t = Tokenizer(models.BPE(vocab=letters, merges=[]))
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))


def main(folder: Path, model: str | None) -> None:
    if model is None:
        tiny(folder / "tiny")
        model = str(folder / "tiny")
    loaded, tokenizer, base = opened(model)
    store = IdentityStore(folder / "people.db")
    for name, said in LIVES.items():
        for source, text in said:
            # With a self and a trace, which sleep would write in minutes: the page shows both.
            rule = Rule(trace=TraceRule(), self=SelfRule()) if name == "mara" else Rule()
            imprint_into(store, name, loaded, tokenizer, imprint_event(text, source=source, rule=rule), base=base)
    store.close()
    (folder / "studies").mkdir(exist_ok=True)
    for path in (Path(__file__).parents[2] / "docs" / "studies").glob("*"):
        if path.suffix in (".json", ".png"):
            shutil.copy(path, folder / "studies")
    (folder / "model.txt").write_text(model)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
