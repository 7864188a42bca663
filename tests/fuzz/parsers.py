"""Every parser of untrusted bytes or records."""

from fuzz.files import FILES
from fuzz.keys import KEYS
from fuzz.messages import MESSAGES
from fuzz.remote import REMOTE
from fuzz.sites import SITE_PARSERS

PARSERS = [*MESSAGES, *KEYS, *FILES, *REMOTE, *SITE_PARSERS]
