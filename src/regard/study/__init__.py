"""Experiments with controls: generated people, what an identity does for them, and the fast write's training."""
