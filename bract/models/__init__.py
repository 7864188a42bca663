"""Models under attack, by name."""
