"""Score how near a reconstruction is to its original, and decide if it counts as leaked.

The names in its stub are imported when they are first used: a page needs the rule alone
(`bract.scores.leaks`), and scorers import torch.
"""

from bract.lazy import lazily

__all__, __getattr__, __dir__ = lazily(__name__)
