"""The ``bract`` command."""
