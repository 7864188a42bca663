"""One file a kind of experiment."""

from __future__ import annotations

from typing import Any

from experiments.papers.declaration import Kind
from experiments.papers.runners.base import Runner


def runner(kind: Kind) -> Runner[Any]:
    """Return what runs a kind of experiment; torch and the attacks are imported first here."""
    from experiments.papers.runners.defense_time import TimeRunner
    from experiments.papers.runners.federation import FederationRunner
    from experiments.papers.runners.gaussians import GaussiansRunner
    from experiments.papers.runners.generator import GeneratorRunner
    from experiments.papers.runners.guardian_steps import StepsRunner
    from experiments.papers.runners.locked_features import FeaturesRunner
    from experiments.papers.runners.reconstruction import ReconstructionRunner
    from experiments.papers.runners.sampled import SampledRunner
    from experiments.papers.runners.sentences import SentencesRunner
    from experiments.papers.runners.text import TextRunner

    kinds: dict[Kind, type[Runner[Any]]] = {
        "reconstruction": ReconstructionRunner,
        "generator": GeneratorRunner,
        "sampled": SampledRunner,
        "federation": FederationRunner,
        "text": TextRunner,
        "sentences": SentencesRunner,
        "gaussians": GaussiansRunner,
        "guardian-steps": StepsRunner,
        "defense-time": TimeRunner,
        "locked-features": FeaturesRunner,
    }
    return kinds[kind]()
