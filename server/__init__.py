"""The server: the app and the capture hook."""

from bract.server.hook import HonestButCurious

__all__ = ["HonestButCurious"]
