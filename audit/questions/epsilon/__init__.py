"""How much at most: epsilon, measured by canaries, beside the account's."""

from bract.audit.questions.epsilon.question import EpsilonQuestion

__all__ = ["EpsilonQuestion"]
