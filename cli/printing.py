"""Print a page of bract to PDF with the Chromium of this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from bract.disk.files import write_bytes
from bract.errors import BractError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")

PATIENCE = 60.0
"""Seconds that the browser has; it is then ended, and what it has printed by then is taken."""


def print_to_pdf(page: Path) -> Path:
    """Print an HTML file to the PDF of its name; return the PDF's path.

    The style sheet's own print rules decide the size. The page holds no script and the browser
    resolves no host name, so nothing is loaded from elsewhere.

    Raises
    ------
    BractError
        If no Chromium is in ``PATH``, or it printed nothing.
    """
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise BractError(
            f"no Chromium to print {page.name} with: {', '.join(BROWSERS)} are not in PATH; "
            f"install one, or open {page} in any browser and print it",
            code="package-missing",
        )
    with TemporaryDirectory() as folder:
        printed = Path(folder) / "page.pdf"
        command = [
            browser,
            "--headless",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--no-first-run",
            "--no-pdf-header-footer",
            f"--user-data-dir={folder}/profile",
            f"--print-to-pdf={printed}",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            page.resolve().as_uri(),
        ]
        _run(command, printed)
        content = printed.read_bytes() if printed.is_file() else b""
    if not content.rstrip().endswith(b"%%EOF"):
        raise BractError(
            f"{browser} printed no PDF of {page}; open the page and print it there",
            code="system-error",
        )
    return write_bytes(page.with_suffix(".pdf"), content)


def _run(command: list[str], printed: Path) -> None:
    """Run a browser until it ends, or until its PDF is whole: some do not end by themselves."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for _ in range(int(PATIENCE / 0.25)):
        try:
            process.wait(0.25)
            return
        except subprocess.TimeoutExpired:
            if printed.is_file() and printed.read_bytes().rstrip().endswith(b"%%EOF"):
                break
    process.kill()
    process.wait()
