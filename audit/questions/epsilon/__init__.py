"""How much at most: epsilon, measured by canaries, beside the account's."""

from bract.audit.questions.epsilon.question import CLAIMED, LEVEL, EpsilonQuestion

__all__ = ["CLAIMED", "LEVEL", "EpsilonQuestion"]
