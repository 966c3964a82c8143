"""A seeded mix of calls like a training's, each with the outcome it must have.

60% arithmetic, 25% sympy, 10% numpy, 5% that fail in all ways, of which at most 100 run into a time limit.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from sandbox.api import Result, Status

MAX_TIMEOUTS = 100


@dataclass(frozen=True, slots=True)
class Case:
    """A program and what must come of it."""

    code: str
    status: Status
    text: str
    """The observation; "" where only the status is determined."""

    def met_by(self, result: Result) -> bool:
        """Whether the result is the one of this program."""
        return result.status is self.status and (not self.text or result.to_text() == self.text)


def _arithmetic(draw: random.Random) -> Case:
    a, b, c = (draw.randrange(10_000) for _ in range(3))
    return Case(f"x = {a}\ny = {b}\nprint(x * y + {c})", Status.OK, str(a * b + c))


def _sympy(draw: random.Random) -> Case:
    a, b = sorted((draw.randrange(1, 100), draw.randrange(100, 200)))
    code = f"from sympy import symbols, solve\nx = symbols('x')\nprint(solve(x**2 - {a + b}*x + {a * b}, x))"
    return Case(code, Status.OK, f"[{a}, {b}]")


def _numpy(draw: random.Random) -> Case:
    a, n = draw.randrange(1, 1000), draw.randrange(2, 30)
    code = f"import numpy as np\nprint(int(np.full(({n}, {n}), {a}).trace()))"
    return Case(code, Status.OK, str(a * n))


def _failing(draw: random.Random) -> Case:
    n = draw.randrange(1, 200)
    return draw.choice(
        (
            Case(f"x = {n}\nprnt(x)", Status.ERROR, "NameError: name 'prnt' is not defined (line 2)"),
            Case(f"print(({n})", Status.ERROR, "SyntaxError: '(' was never closed (line 1)"),
            Case(f"print({n})\n{n} / 0", Status.ERROR, f"{n}\nZeroDivisionError: division by zero (line 2)"),
            Case(f"import sys\nsys.exit({n})", Status.EXIT, f"exit code {n}"),
            Case(f"print({n}, flush=True)\nimport os\nos.abort()", Status.SIGNAL, f"{n}\nkilled by signal 6"),
            Case(f"a = bytearray({n} << 30)", Status.MEMORY, "out of memory (line 1)"),
            Case(f"import sys\nwhile True: sys.stdout.write('{n}' * 65536)", Status.OUTPUT_LIMIT, ""),
            Case(f"import os, time\nif os.fork() == 0: time.sleep(60)\nprint({n})", Status.OK, str(n)),
        )
    )


def mix(count: int, seed: int) -> list[Case]:
    """`count` cases."""
    draw = random.Random(seed)
    cases: list[Case] = []
    timeouts = 0
    for _ in range(count):
        kind = draw.random()
        if kind < 0.60:
            cases.append(_arithmetic(draw))
        elif kind < 0.85:
            cases.append(_sympy(draw))
        elif kind < 0.95:
            cases.append(_numpy(draw))
        elif kind < 0.955 and timeouts < min(MAX_TIMEOUTS, count // 400):
            timeouts += 1
            n = draw.randrange(1000)
            cases.append(Case(f"print({n})\nimport time\ntime.sleep(60)", Status.TIMEOUT, f"{n}\ntimed out"))
        else:
            cases.append(_failing(draw))
    return cases
