"""The facts that a report shows."""
