"""Seeded pairs of an answer and its gold, of the kinds that mathematics problems have; no two are equal."""

from __future__ import annotations

# What is put in is different for each pair, so that nothing can be remembered of it; one in ten is wrong.
_FORMS = (
    ("{n}\\sqrt{{3}}", "\\sqrt{{{c}}}"),
    ("({n}, {m})", "({n},{m})"),
    ("\\frac{{{n}\\pi}}{{7}}", "{n}\\pi/7"),
    ("x = {n}", "{n}"),
    ("\\{{1, {n}\\}}", "\\{{{n}, 1\\}}"),
    ("(x+{n})^2", "x^2+{d}x+{q}"),
    ("[{n}, \\infty)", "[{n},\\infty)"),
    ("{n}\\%", "{n}"),
    ("\\frac{{{n}x+1}}{{2}}", "{n}x/2+1/2"),
    ("{n}x+1", "{m}x+1"),
)


def answer_pairs(count: int, first: int = 11) -> list[tuple[str, str]]:
    """`count` pairs; the same `first` gives the same ones."""
    pairs = []
    for n in range(first, first + count):
        values = {"n": n, "m": n + 1, "c": 3 * n * n, "d": 2 * n, "q": n * n}
        answer, gold = _FORMS[n % len(_FORMS)]
        pairs.append((answer.format(**values), gold.format(**values)))
    return pairs


def hard_pairs(count: int, first: int = 11) -> list[tuple[str, str]]:
    """Pairs that are equal only after a fraction of polynomials was reduced."""
    return [(f"\\frac{{x^2-1}}{{x-1}}+{n}", f"x+1+{n}") for n in range(first, first + count)]


def is_wrong(pair: tuple[str, str]) -> bool:
    """Whether the answer is not the gold one."""
    return pair[1].endswith("x+1")
