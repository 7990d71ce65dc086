"""One file per group of routes; each has a `router`, and app.py lists them."""

from __future__ import annotations

from ...errors import needs_extra

# Before any file of routes imports from it: whoever has not installed it is told what to install.
with needs_extra("serve"):
    import fastapi as fastapi
