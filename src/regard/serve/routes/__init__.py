"""One file per group of routes; each has a `router`, and app.py lists them."""
