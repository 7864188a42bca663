"""Pooled places: the places that max pooling took, and the maps and the image behind them."""
