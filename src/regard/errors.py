"""Every error is a ValueError that echoes the offending values and says what to write instead."""


class RegardError(ValueError):
    """Base of all errors raised by regard."""


class SpecError(RegardError):
    """A spec that cannot be read: an unknown name, a bad parameter."""


class ShapeError(RegardError):
    """Tensors whose shapes do not fit each other."""


class StateError(RegardError):
    """A mechanism needs a tensor that `state=` does not carry, or carries wrongly."""


class CombinationError(RegardError):
    """Two parts that have no meaning together."""


class NumericsError(RegardError):
    """Inputs that are not finite, or whose scores overflow."""


class CheckpointError(RegardError):
    """A checkpoint that is damaged, hostile, or not of the shape that its own configuration says."""


class RegardWarning(UserWarning):
    """What will be done, and will hardly be what was meant."""
