"""Makes a tiny random model that can chat, as a folder, and fetches the sentence encoder: `.venv/bin/python tests/clients/tiny.py FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from serving import tiny_model

from regard.models import downloads
from regard.models.convert import save

folder = Path(sys.argv[1])
draft = folder.with_name(folder.name + ".draft")
model, _ = tiny_model(draft, seed=7, context=2048)
save(model, draft)
downloads.get("minilm")
draft.rename(folder)
