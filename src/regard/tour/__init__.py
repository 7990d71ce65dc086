"""A tour of the operator: `python -m regard.tour demo` writes a page, `python -m regard.tour docs` the pictures of the docs.

Figures need the extra `figures` (matplotlib, rich); nothing here is imported by `import regard`.
"""
