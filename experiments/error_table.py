"""The page of error codes: ``python -m experiments.error_table docs/reference/errors.md``."""

from __future__ import annotations

import sys
from pathlib import Path

from bract.disk.files import write_text
from bract.errors.codes import GROUPS

HEAD = """# Error codes

<!-- written by `python -m experiments.error_table docs/reference/errors.md` -->

An error has a code, which says what to do, and a message, which names the file, key or client, what
was found and what was expected. Codes keep their meaning between versions; messages may change. In
Python the code is `error.code` of a `bract.errors.BractError`. With `--format json` a command that
ends with an error prints one JSON document to stdout, and exits with the
[exit code](../guide/command-line.md) that it has without the option:

```json
{"error": {"code": "file-missing", "message": "federation.yaml: no such file; ..."}}
```

A command whose result is the error (a crossed gate, a failed check) prints its result instead: the
exit code names the error. A client sends a server no code of an error that depends on its data: the
server receives one constant text, and the reason is in the client's own log.
"""


def page() -> str:
    """Return the page as Markdown."""
    parts = [HEAD]
    for title, codes in GROUPS.items():
        rows = "".join(f"| `{code}` | {text} |\n" for code, text in codes.items())
        parts.append(f"## {title}\n\n| code | meaning and remedy |\n| --- | --- |\n{rows}")
    return "\n".join(parts)


if __name__ == "__main__":
    write_text(Path(sys.argv[1]), page())
