"""TabLeak: rows of a table by optimisation."""
