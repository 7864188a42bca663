"""Captures: what a server holds of its clients, on its disk or at a URL."""
