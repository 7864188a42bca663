"""One federation undefended and under each defense, side by side."""
