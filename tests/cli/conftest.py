"""Let the tests of commands use what the tests of the launcher define, also when run alone."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "launch"))
