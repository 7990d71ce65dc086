"""The slow write: a few anchored gradient steps over what was lived through, on texts that are kept as data."""
