"""Brings an interpreter to the state that calls are forked from.

Consumes    the name of a profile
Produces    imported and used modules, one heap in huge pages
Waits for   nothing
Invariant   single-threaded at the end; nothing here depends on a request
"""

from __future__ import annotations

from typing import IO, TextIO

from sandbox import answers, guest, linux

_STDLIB = (
    "abc", "array", "ast", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math", "numbers",
    "operator", "pprint", "random", "re", "statistics", "string", "textwrap", "time", "traceback", "typing",
)  # fmt: skip


def preload(sci: bool) -> None:
    """Import what calls import, and use it once, so that children find it done."""
    for name in _STDLIB:
        __import__(name)
    guest.execute("import math\nx = [str(i) for i in range(9)]\nf'{math.pi:.3f}'", {})
    if not sci:
        return
    import numpy as np
    import sympy

    np.linalg.det(np.random.default_rng(0).random((4, 4)))
    np.random.seed()
    x = sympy.symbols("x")
    sympy.solve(x**2 - 3 * x + 2, x)
    sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2)
    sympy.integrate(x * sympy.exp(x), x)
    str(sympy.factor(x**4 - 1))
    answers.warm()


def status_kib(file: IO[str], name: str) -> int:
    file.seek(0)
    return next(int(line.split()[1]) for line in file if line.startswith(name + ":"))


def collapse_heap(maps: IO[str]) -> None:
    """Put the anonymous memory into huge pages: a fork copies one entry for 2 MiB instead of 512."""
    huge = 2 << 20
    for line in maps.read().splitlines():
        span, mode, _, _, inode, *name = line.split(maxsplit=5)
        if mode != "rw-p" or inode != "0" or (name and name[0].startswith("[stack")):
            continue
        low, high = (int(part, 16) for part in span.split("-"))
        start, end = -(-low // huge) * huge, high // huge * huge
        if end > start:
            linux.collapse(start, end - start)


def writer(fd: int) -> TextIO:
    """A line-buffered text stream, so that what was printed survives a kill."""
    return open(fd, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)
