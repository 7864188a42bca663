"""The configuration of one federation: one YAML file, checked before any process starts."""

from bract.config.config import (
    DataConfig,
    FederationConfig,
    StrategySection,
    build_config,
    dump_config,
    load_config,
)
from bract.config.signal import SignalSchema

__all__ = [
    "DataConfig",
    "FederationConfig",
    "SignalSchema",
    "StrategySection",
    "build_config",
    "dump_config",
    "load_config",
]
