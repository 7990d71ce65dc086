"""Experiments with controls: people who were made up, what an identity does for them, and the fast write's training."""
