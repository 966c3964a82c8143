"""Runs a command as an ordinary user who can reach this Python: `python -m tests.sandbox_rootless MODE COMMAND...`.

MODE is `namespaces`, or `none` where the kernel refuses user namespaces (as it does in a chroot).

Root's home is usually closed to others, and a Python may live there; so the command gets a mount namespace in which
the closed directories on the way to it are open, and nothing else of root's is in them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sandbox import linux

NOBODY = 65534


def _open_way_to(prefix: str) -> None:
    for parent in [*reversed(Path(prefix).parents)][1:]:
        if parent.stat().st_mode & 0o005 == 0o005:
            continue
        child = Path(prefix).relative_to(parent).parts[0]
        fd = os.open(parent / child, os.O_PATH)
        linux.mount(b"open", bytes(parent), b"tmpfs", 0, b"mode=755,size=1m")
        (parent / child).mkdir()
        linux.mount(f"/proc/self/fd/{fd}".encode(), bytes(parent / child), None, linux.MS_BIND | linux.MS_REC)
        os.close(fd)


def main() -> None:
    """Become nobody and go on as the command."""
    linux.unshare(linux.CLONE_NEWNS)
    linux.mount(b"none", b"/", None, linux.MS_REC | linux.MS_PRIVATE)
    for prefix in {sys.base_prefix, sys.prefix, os.getcwd()}:
        _open_way_to(prefix)
    os.chdir(os.getcwd())
    if sys.argv[1] == "none":
        here = os.getcwd()
        linux.mount(b"/", b"/mnt", None, linux.MS_BIND | linux.MS_REC)
        os.chroot("/mnt")
        os.chdir(here)
    os.setgroups(())
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    os.environ["HOME"] = "/tmp"
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
