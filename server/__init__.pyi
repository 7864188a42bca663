from bract.server.disclosures import DisclosureRule as DisclosureRule
from bract.server.hook import HonestButCurious as HonestButCurious
from bract.server.listening import listen as listen
