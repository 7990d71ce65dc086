"""A tour of the operator: `python -m demo demo` writes a page, `python -m demo docs` the pictures of the docs.

Figures need the extra `figures` (matplotlib, rich); nothing here is imported by `import regard`.
"""
