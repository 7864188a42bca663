"""The server: the app, the capture hook, the audit and its report."""

from bract.server.hook import HonestButCurious

__all__ = ["HonestButCurious"]
