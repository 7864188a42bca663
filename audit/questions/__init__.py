"""Questions of an audit: each plans, runs its attackers, and decides by one rule.

The names in its stub are imported when they are first used: a page needs the rules alone
(`bract.audit.questions.rules`), and the questions import torch.
"""

from bract.lazy import lazily

__all__, __getattr__, __dir__ = lazily(__name__)
