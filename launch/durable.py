"""Files that are there whole or not at all.

Consumes    texts
Produces    files
Waits for   the disk
Invariant   a crash leaves the file of before or the new one
"""

from __future__ import annotations

import os
from pathlib import Path


def write(path: Path, text: str) -> None:
    """The whole file or none of it, synced."""
    scratch = path.with_name(f".{path.name}.new")
    with open(scratch, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
