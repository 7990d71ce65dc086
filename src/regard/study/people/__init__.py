"""Invented people: who they are, what they say, and what may be asked of them."""
