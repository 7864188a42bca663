"""The one-page leakage report."""
