"""Errors of keys and ciphertexts, one exception a cause."""


class PaillierError(ValueError):
    """Base of every error that this package raises about its input."""


class KeyMismatchError(PaillierError):
    """A ciphertext, share or sealed box belongs to another key."""


class CiphertextError(PaillierError):
    """A ciphertext is truncated, out of range or, where that can be seen, altered."""


class UndecryptableError(CiphertextError):
    """A ciphertext decrypts to impossible values, so it was altered; the error itself is a leak."""


class CapacityError(PaillierError):
    """A sum could overflow its slots: the message gives bits, clients and weights."""


class ThresholdError(PaillierError):
    """Too few, repeated or contradicting partial decryptions."""


class PartialError(ThresholdError):
    """Partial decryptions that do not come from the shares that they name.

    Attributes:
        positions: Which of the given ones, from 0.
    """

    def __init__(self, message: str, positions: tuple[int, ...]) -> None:
        super().__init__(message)
        self.positions = positions


class SealError(PaillierError):
    """A sealed box does not open: wrong key, wrong context, or altered on its way."""
