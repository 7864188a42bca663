"""Networks of papers, by name."""
