"""The server: the app and the capture hook."""

from bract.server.disclosures import DisclosureRule
from bract.server.hook import HonestButCurious
from bract.server.listening import listen

__all__ = ["DisclosureRule", "HonestButCurious", "listen"]
