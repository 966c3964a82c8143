"""Grades an answer against the gold answer.

Consumes    two strings
Produces    a Verdict: plain numbers are compared exactly and at once, everything else by math-verify
Waits for   nothing; `grade` is given the seconds it may take and runs in a child that holds no model code
Invariant   an answer is graded as a whole: "69 or 70" is two numbers and not the number 70; a comparison that was
            interrupted is a timeout and never a wrong answer
"""

from __future__ import annotations

import functools
import re
import signal
import types
from fractions import Fraction
from typing import Any

from sandbox.api import Verdict

GRADE_S = 2.0
"""Seconds one comparison may take."""
MAX_PLAIN_CHARS = 1000
_REPEAT_S = 0.05
_PLAIN = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+)?(\.\d*)?", re.ASCII)
_FRACTION = re.compile(
    r"(-?)(?:\\[dt]?frac(?:\{(-?\d{1,99})\}|(\d))(?:\{(\d{1,99})\}|(\d))|(\d{1,99})/(\d{1,99}))", re.ASCII
)
_TWO_NUMBERS = re.compile(r"\d\s+\d", re.ASCII)
_SHAPES = (
    ("\\frac{1}{2}", "0.5"), ("x^2-1", "(x-1)(x+1)"), ("\\{1,2\\}", "\\{2,1\\}"), ("x=3", "3"), ("(1, 2)", "(1,2)"),
    ("[0, 1)", "[0,1)"), ("2\\sqrt{3}", "\\sqrt{12}"), ("\\frac{\\pi}{4}", "\\pi/4"), ("2^{10}", "1024"),
    ("12\\%", "12"), ("3x+1", "1+3x"), ("\\frac{x^2+1}{x-1}", "e^2"), ("\\text{C}", "C"),
    ("10!", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
)  # fmt: skip
"""Answers of the usual forms: what the parser finds out about them is there for the next."""
_MAX_POWER = 20
_POWER = re.compile(r"\*\*\s*(-?\w+)", re.ASCII)


def plain_number(text: str) -> Fraction | None:
    """The exact value of an integer or decimal such as "70", "-1,234.50" or "$.5$"; None for anything else."""
    text = _bare(text)
    match = _PLAIN.fullmatch(text)
    if match is None or len(text) > MAX_PLAIN_CHARS or not any(char.isdigit() for char in text):
        return None
    sign, whole, part = match.groups()
    digits = (part or ".")[1:]
    value = Fraction(int((whole or "0").replace(",", "") + digits), 10 ** len(digits))
    return -value if sign == "-" else value


def plain_fraction(text: str) -> Fraction | None:
    """The exact value of "-3/4", "\\frac{3}{4}" or "\\frac34"; None for anything else."""
    match = _FRACTION.fullmatch(_bare(text))
    if match is None:
        return None
    sign, top, short_top, bottom, short_bottom, left, right = match.groups()
    below = int(bottom or short_bottom or right)
    value = Fraction(int(top or short_top or left), below) if below else None
    return -value if value is not None and sign else value


def _bare(text: str) -> str:
    """The text without white space, dollar signs and one enclosing \\boxed{}."""
    text = text.strip().strip("$").strip()
    if text.startswith("\\boxed{") and text.endswith("}") and text.count("{") == 1:
        text = text[len("\\boxed{") : -1].strip()
    return text


def quick_verdict(answer: str, gold: str) -> Verdict | None:
    """The verdict when it needs no mathematics: both are plain numbers or fractions, or the answer is empty."""
    if not _bare(answer):
        return Verdict.UNPARSABLE
    wanted, given = plain_number(gold), plain_number(answer)
    if wanted is not None and _TWO_NUMBERS.search(_bare(answer)):  # math-verify would read "70 70" as 140
        return Verdict.WRONG
    if wanted is None or given is None:
        wanted, given = _or_fraction(wanted, gold), _or_fraction(given, answer)
        if wanted is None or given is None:
            return None
        if wanted != given and ("." in answer or "." in gold):  # it may be one rounded to the other
            return None
    return Verdict.RIGHT if given == wanted else Verdict.WRONG


def _or_fraction(value: Fraction | None, text: str) -> Fraction | None:
    return plain_fraction(text) if value is None else value


class _Expired(BaseException):
    """The time for a comparison is over. A BaseException, so that nothing on the way takes it for an error."""


class _Alarm:
    """Raises _Expired in the main thread when the time is over, and again until it gets through."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.rang = False

    def __enter__(self) -> _Alarm:
        signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._limit_s, _REPEAT_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)

    def _ring(self, number: int, frame: types.FrameType | None) -> None:
        self.rang = True
        raise _Expired


def grade(answer: str, gold: str, limit_s: float) -> Verdict:
    """Compare with math-verify; for the main thread of a process that may be killed."""
    quick = quick_verdict(answer, gold)
    if quick is not None:
        return quick
    alarm = _Alarm(limit_s)
    verdict = Verdict.TIMEOUT
    try:
        with alarm:
            verdict = _compare(answer, gold)
    except _Expired:
        return Verdict.TIMEOUT
    except (MemoryError, RecursionError):  # too big to be compared with the means given
        return Verdict.TIMEOUT
    return Verdict.TIMEOUT if alarm.rang and verdict is not Verdict.RIGHT else verdict


def _compare(answer: str, gold: str) -> Verdict:
    from math_verify import verify

    target = _parse(answer)
    wanted = _parse(gold)
    if not wanted or not target:
        return Verdict.UNPARSABLE
    equal = equal_fractions(wanted[0], target[0]) if len(wanted) == len(target) == 1 else None
    if equal is None:
        equal = verify(wanted, target, timeout_seconds=None)
    return Verdict.RIGHT if equal else Verdict.WRONG


def equal_fractions(one: Any, other: Any) -> bool | None:
    """Whether two fractions of polynomials are equal; None where one of them is something else.

    What math-verify finds by simplifying the difference, which takes twenty times as long.
    """
    from sympy import Expr

    symbols: set[Any] = set()
    if not (isinstance(one, Expr) and isinstance(other, Expr)):
        return None
    if one.is_Symbol or other.is_Symbol or not (_is_fraction(one, symbols) and _is_fraction(other, symbols)):
        return None
    if len({symbol.name for symbol in symbols}) < len(symbols) or not symbols:
        return None
    try:
        top, bottom = (one - other).as_numer_denom()
        return None if bottom.expand() == 0 else bool(top.expand() == 0)
    except Exception:  # sympy stumbles over sums that were not evaluated, such as 0+0; math-verify helps itself
        return None


def _is_fraction(node: Any, symbols: set[Any]) -> bool:
    """Whether it is made of symbols and rational numbers by the four operations and small powers; its symbols."""
    if node.is_Symbol:
        symbols.add(node)
        return True
    if node.is_Pow:
        base, exponent = node.args
        return bool(exponent.is_Integer and abs(exponent) <= _MAX_POWER) and _is_fraction(base, symbols)
    if node.is_Add or node.is_Mul:
        return all(_is_fraction(part, symbols) for part in node.args)
    return bool(node.is_Rational)


@functools.lru_cache(maxsize=256)
def _parse(text: str) -> list[Any]:
    """What math-verify reads when the whole text is one boxed expression; rollouts of a group share their gold."""
    from math_verify import LatexExtractionConfig, parse

    text = text.strip().strip("$").strip()
    if "\\boxed" not in text:
        text = "\\boxed{" + _POWER.sub(r"^{\1}", text) + "}"
    found = parse(text, extraction_config=[LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
    return [part for part in found if not isinstance(part, str)]


def warm() -> None:
    """Bring a zygote to the state in which a comparison is fast; silence math-verify's advice about time-outs."""
    import logging

    from sandbox import latex

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    latex.install()
    for answer, gold in _SHAPES:
        _compare(answer, gold)
