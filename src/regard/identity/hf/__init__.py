"""Mechanisms and identities inside models of transformers, through its attention interface."""
