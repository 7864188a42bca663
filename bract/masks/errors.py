"""Errors of masked sums."""


class MaskError(ValueError):
    """Base of every error that this package raises about its input."""


class LostSumError(MaskError):
    """A round's sum cannot be unmasked.

    Attributes:
        node: The client because of whom; None where too few clients answered.
    """

    def __init__(self, message: str, node: int | None = None) -> None:
        super().__init__(message)
        self.node = node
