"""The papers' tables and the benchmarks; part of the checkout, of no distribution of bract."""
