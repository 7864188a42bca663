"""The one error type whose message is written for the person at the keyboard."""


class BractError(Exception):
    """Bad input. The message names what was found, what was expected and the mend.

    The command line prints it as one line and exits with code 2.
    """


class SchemaError(BractError):
    """A file on disk has another schema version than this one reads."""


class RunFailedError(BractError):
    """Work that was asked for correctly did not finish. The command line exits with code 1."""

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class LeakageError(Exception):
    """A gate crossed, or one that had nothing to judge; the command exits with code 3."""
