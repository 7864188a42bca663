"""Against Guardian."""
