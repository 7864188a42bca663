from bract.attacks.registry import reconstruct as reconstruct
from bract.audit.audit import Audit as Audit
from bract.captures.observation import Observation as Observation
from bract.captures.observation import ObservationStore as ObservationStore
from bract.client import DefenseMod as DefenseMod
from bract.client import keep as keep
from bract.client import witness as witness
from bract.report import write_report as write_report
from bract.server import HonestButCurious as HonestButCurious
from bract.server import listen as listen

__version__: str
