"""Answers: read exactly where they are plain, and otherwise graded as math-verify grades them, only sooner."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latex2sympy2_extended.gen.antlr4_13_2.PSParser import PSParser
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy
from math_verify import verify
from math_verify.parser import extract_latex, parse_latex_cached
from sympy import srepr

from sandbox import answers, latex
from sandbox.answers import grade, plain_fraction, plain_number, quick_verdict
from sandbox.api import Verdict


@pytest.fixture(scope="module", autouse=True)
def _quick_reader() -> Iterator[None]:
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    latex.install()
    yield
    latex.uninstall()


@pytest.mark.parametrize(
    ("text", "value"),
    [("70", 70), ("-1,234.50", Fraction("-1234.5")), ("$.5$", Fraction(1, 2)), ("\\boxed{7}", 7), ("+3.", 3),
     ("007", 7), ("1,23", None), ("", None), (".", None), ("-", None), ("1e3", None), ("70%", None), ("7 0", None),
     ("\u0667", None), ("1" * 2000, None)],
)  # fmt: skip
def test_plain_numbers_are_read_exactly(text: str, value: object) -> None:
    assert plain_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("3/4", Fraction(3, 4)), ("-\\frac{3}{4}", Fraction(-3, 4)), ("\\dfrac{-3}{6}", Fraction(-1, 2)),
     ("\\frac34", Fraction(3, 4)), ("\\frac{3}4", Fraction(3, 4)), ("$8/2$", 4), ("1/0", None), ("1 1/2", None),
     ("1/2/3", None), ("\\frac345", None), ("1.5/2", None), ("x/2", None), ("\\frac{1}{-2}", None)],
)  # fmt: skip
def test_plain_fractions_are_read_exactly(text: str, value: object) -> None:
    assert plain_fraction(text) == value


@given(st.integers(-(10**12), 10**12), st.integers(-(10**12), 10**12))
def test_integers_are_equal_only_to_themselves(a: int, b: int) -> None:
    assert quick_verdict(str(a), str(b)) is (Verdict.RIGHT if a == b else Verdict.WRONG)
    assert quick_verdict(f"{a:,}.0", str(a)) is Verdict.RIGHT


@pytest.mark.parametrize(
    ("answer", "gold", "verdict"),
    [
        ("7000", "70", Verdict.WRONG), ("0.7", "70", Verdict.WRONG), ("20001", "20000", Verdict.WRONG),
        ("123460", "123456", Verdict.WRONG), ("69 or 70", "70", Verdict.WRONG), ("70, 69", "70", Verdict.WRONG),
        ("70 70", "140", Verdict.WRONG), ("\\boxed{70}", "70", Verdict.RIGHT), ("x = 70", "70", Verdict.RIGHT),
        ("10**12", "10^{12}", Verdict.RIGHT), ("\\frac12", "0.5", Verdict.RIGHT), ("", "70", Verdict.UNPARSABLE),
        ("\\\\", "70", Verdict.UNPARSABLE), ("seventy", "70", Verdict.WRONG), ("0.333333", "1/3", Verdict.RIGHT),
        ("(a+b)(b+c)(c+a)", "(b+a)(c+a)(c+b)", Verdict.RIGHT), ("\\frac{x^2-1}{x-1}", "x+1", Verdict.RIGHT),
        ("\\frac{x^2-1}{x-1}", "x+2", Verdict.WRONG),
    ],
)  # fmt: skip
def test_answers_are_graded_as_a_whole(answer: str, gold: str, verdict: Verdict) -> None:
    assert grade(answer, gold, 10.0) is verdict


_INTEGERS = st.integers(-30, 30)
_FRACTIONS = st.one_of(
    _INTEGERS.map(str),
    st.tuples(_INTEGERS, st.integers(1, 30)).map(lambda f: f"\\frac{{{f[0]}}}{{{f[1]}}}"),
    st.tuples(st.integers(0, 30), st.integers(1, 30)).map(lambda f: f"-{f[0]}/{f[1]}"),
    st.tuples(st.integers(0, 9), st.integers(1, 9)).map(lambda f: f"\\tfrac{f[0]}{f[1]}"),
    st.decimals(-9, 9, places=1, allow_nan=False).map(str),
)


@settings(max_examples=150, deadline=None)
@given(_FRACTIONS, _FRACTIONS)
def test_a_quick_verdict_on_fractions_is_math_verifys(answer: str, gold: str) -> None:
    quick = quick_verdict(answer, gold)
    if quick is not None:
        assert quick is _slow_verdict(answer, gold), (answer, gold)


def _grow(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(parts, parts)
    return st.one_of(
        two.map(lambda p: f"{p[0]}+{p[1]}"),
        two.map(lambda p: f"{p[0]}-({p[1]})"),
        two.map(lambda p: f"({p[0]})({p[1]})"),
        two.map(lambda p: f"\\frac{{{p[0]}}}{{{p[1]}}}"),
        st.tuples(parts, st.integers(0, 3)).map(lambda p: f"({p[0]})^{p[1]}"),
        parts.map(lambda p: f"-({p})"),
    )


_ATOMS = st.one_of(st.integers(0, 12).map(str), st.sampled_from("xyn"))
_RATIONAL = st.recursive(_ATOMS, _grow, max_leaves=5)


def _grow_more(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    forms = (
        "\\sqrt{%s}", "(%s, 2)", "[0, %s)", "(1,%s,x)", "\\{%s, 1\\}", "x=%s", "x \\le %s", "|%s|", "\\pi %s", "%s\\%%",
        "%s\\text{ cm}", "\\sin(%s)", "\\log_2 %s", "e^{%s}", "\\begin{pmatrix}%s\\\\1\\end{pmatrix}", "(-\\infty,%s]",
        "[1,2] \\cup [3,%s]", "\\boxed{%s}", "%s \\text{ or } 3", "%s^\\circ", "\\int_0^1 %s dx", "f(%s)", "%s=y+1=3",
    )  # fmt: skip
    return st.one_of(st.tuples(st.sampled_from(forms), parts).map(lambda p: p[0] % p[1]), _grow(parts))


_ANY = st.one_of(
    st.recursive(_ATOMS, _grow_more, max_leaves=4),
    st.text(st.sampled_from("0123xyeiABC.,;:+-*/^_=<>()[]{}|\\ !%$"), max_size=12),
)


def _reset() -> None:
    for cache in (answers._parse, extract_latex, parse_latex_cached):
        cache.cache_clear()


def _slow_verdict(answer: str, gold: str) -> Verdict:
    """Of math-verify as it is."""
    latex.uninstall()
    _reset()
    try:
        wanted, target = answers._parse(gold), answers._parse(answer)
        if not wanted or not target:
            return Verdict.UNPARSABLE
        return Verdict.RIGHT if verify(wanted, target, timeout_seconds=None) else Verdict.WRONG
    finally:
        latex.install()
        _reset()


@pytest.mark.slow
@settings(max_examples=120, deadline=None)
@given(_RATIONAL, _RATIONAL)
def test_fractions_of_polynomials_are_compared_as_math_verify_does(answer: str, gold: str) -> None:
    for pair in ((answer, gold), (answer, f"({answer})+({gold})-({gold})")):
        assert answers._compare(*pair) is _slow_verdict(*pair), pair


def _read(text: str) -> str:
    """The tree that ANTLR reads, rule by rule, and the expression that is made of it; or that there is none."""
    reader = _Latex2Sympy(is_real=True)
    try:
        tree = reader.create_parser(text).math().toStringTree(ruleNames=PSParser.ruleNames)
        return f"{tree} {srepr(reader.parse(text))}"
    except Exception as error:
        return type(error).__name__


_OTHER_DIGITS = str.maketrans("0123456789xn", "1974283560yz")


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(_ANY)
def test_what_is_remembered_changes_no_reading(text: str) -> None:
    same_form = text.translate(_OTHER_DIGITS)
    quick = [_read(text), _read(text), _read(same_form), _read(text)]
    latex.uninstall()
    try:
        assert quick == [_read(text), _read(text), _read(same_form), _read(text)]
    finally:
        latex.install()


def test_texts_of_one_form_share_a_tree() -> None:
    latex._Reader.known.clear()
    texts = [str(_Latex2Sympy().parse(f"{n}x+{n}")) for n in (2, 20, 300)]
    assert texts == ["2*x + 2", "20*x + 20", "300*x + 300"]
    assert len(latex._Reader.known) == 1


@settings(deadline=None)
@given(st.one_of(st.text("0123456789.,", max_size=9), st.sampled_from(["1.", ".5", "0x1", "1e5", "", "00", "\u0663"])))
def test_numbers_are_made_as_they_were(text: str) -> None:
    def made(parse: object) -> object:
        try:
            return repr(parse(_Latex2Sympy(), text))  # type: ignore[operator]
        except Exception as error:
            return type(error)

    assert made(latex._parse_number) == made(latex._read_number)
