"""Decoding: a model prepared once (`prepare`), its caches, products in C for few rows, and text from it (`generate`)."""
