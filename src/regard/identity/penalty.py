"""How much less likely a word becomes in an answer once it was said: see `Sampling.repetition_penalty`."""

REPETITION_PENALTY = 1.1
"""Of answers in a conversation. Without one, SmolLM2 answered every second message with an answer that it had given before."""

__all__ = ["REPETITION_PENALTY"]
