"""Who was in it: whether records can be recognised as trained on."""

from bract.audit.questions.membership.question import MembershipQuestion
from bract.audit.questions.membership.score import permuted_chance

__all__ = ["MembershipQuestion", "permuted_chance"]
