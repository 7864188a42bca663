"""GRNN, its generator and its second-order finish."""
