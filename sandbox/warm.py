"""Brings an interpreter to the state that calls are forked from.

Consumes    the name of a profile
Produces    imported and used modules, one heap in huge pages
Waits for   nothing
Invariant   single-threaded at the end; nothing here depends on a request
"""

from __future__ import annotations

from typing import IO, TextIO

from sandbox import answers, guest, linux

_ROUNDS = 12
_STDLIB = (
    "abc", "array", "ast", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "dataclasses",
    "datetime", "decimal", "enum", "fractions", "functools", "heapq", "io", "itertools", "json", "math", "numbers",
    "operator", "pprint", "random", "re", "statistics", "string", "textwrap", "time", "traceback", "typing",
)  # fmt: skip


def preload(sci: bool) -> None:
    """Import what calls import, and use it often enough that Python has specialised its code for it."""
    for name in _STDLIB:
        __import__(name)
    for number in range(_ROUNDS):
        guest.execute(f"import math\nx = [str(i) for i in range({number})]\nf'{{math.pi:.3f}} {{x}}'", {})
    if not sci:
        return
    import numpy as np
    import sympy

    np.random.seed()
    x, y = sympy.symbols("x y")
    sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2)
    sympy.integrate(x * sympy.exp(x), x)
    for number in range(3, 3 + _ROUNDS):
        matrix = np.eye(4) * number
        str(np.linalg.det(matrix)), str(matrix)
        sympy.solve(x**2 - (number + 2) * x + 2 * number, x)
        sympy.solve([x + y - number, x - y - 1], [x, y])
        str(sympy.factor(x**3 - number**3)), str(sympy.expand((x + number) ** 3))
        sympy.diff(x**number, x), sympy.simplify((x**2 - number**2) / (x - number))
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
