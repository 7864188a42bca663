"""Can the inputs that a client trained on be rebuilt from what the server holds?"""

from bract.audit.questions.reconstruction.question import ReconstructionQuestion

__all__ = ["ReconstructionQuestion"]
