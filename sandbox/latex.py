"""Makes math-verify's LaTeX reader quick without changing what it reads.

Consumes    the parser that math-verify builds for each text
Produces    the same expressions: texts of one form, such as "(1, 2)" and "(30, 40)", share a tree; predictions that
            depend on a rule's callers are remembered; plain numbers are made without compiling them as Python
Waits for   nothing
Invariant   what is remembered is a function of its key: a tree of the types of all tokens (the grammar looks at nothing
            else), a prediction of the decision, the rules under way, the precedence and the types of the tokens that
            were looked at. Nothing is remembered of a reading that failed
"""

from __future__ import annotations

from typing import Any, ClassVar

import sympy
from antlr4.atn.ParserATNSimulator import ParserATNSimulator
from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

_MAX_KEYS = 20_000
_MAX_FORMS = 2000
_MAX_DIGITS = 1000


class _Predictor(ParserATNSimulator):
    """ANTLR's predictor keeps what it finds out, except where the rules under way matter: there it starts anew for each
    text, which for "(1, 2)" takes ten times as long as all the rest. This one keeps that as well."""

    _known: ClassVar[dict[tuple[int, ...], dict[int, dict[tuple[int, ...], int]]]] = {}
    """(decision, precedence, callers) -> number of tokens looked at -> their types -> the alternative."""
    _dependent: ClassVar[set[int]] = set()
    """Decisions that ever needed the callers."""

    def execATN(self, dfa: Any, s0: Any, input: Any, startIndex: int, outerContext: Any) -> int:
        """The alternative to take; the names are ANTLR's."""
        if dfa.decision not in self._dependent:
            return self._find(dfa, s0, input, startIndex, outerContext)
        for length, known in self._known.get(self._key(dfa, outerContext), {}).items():
            alternative = known.get(_types(input, startIndex, startIndex + length))
            if alternative is not None:
                return alternative
        return self._find(dfa, s0, input, startIndex, outerContext)

    def _find(self, dfa: Any, s0: Any, input: Any, start: int, context: Any) -> int:
        """Predict as ANTLR does; remember it if the callers were needed."""
        self._looked_to = -1
        alternative: int = super().execATN(dfa, s0, input, start, context)
        if self._looked_to >= 0:
            types = _types(input, start, max(self._looked_to, input.index) + 1)
            if len(self._known) >= _MAX_KEYS:
                self._known.clear()
            self._known.setdefault(self._key(dfa, context), {}).setdefault(len(types), {})[types] = alternative
            self._dependent.add(dfa.decision)
        return alternative

    def _key(self, dfa: Any, context: Any) -> tuple[int, ...]:
        return (dfa.decision, self.parser.getPrecedence(), *_callers(context))

    def execATNWithFullContext(self, dfa: Any, D: Any, s0: Any, input: Any, startIndex: int, outerContext: Any) -> int:
        """Where the callers come in; how far was looked without them is noted."""
        self._looked_to = input.index
        alternative: int = super().execATNWithFullContext(dfa, D, s0, input, startIndex, outerContext)
        return alternative

    def getSynValidOrSemInvalidAltThatFinishedDecisionEntryRule(self, configs: Any, outerContext: Any) -> int:
        """No alternative fits, and the best guess is taken: how far was looked is lost, so it is not remembered."""
        self._looked_to = -1
        guess: int = super().getSynValidOrSemInvalidAltThatFinishedDecisionEntryRule(configs, outerContext)
        return guess


def _callers(context: Any) -> list[int]:
    """The places that the rules under way were called from, innermost first."""
    places = []
    while context is not None:
        places.append(context.invokingState)
        context = context.parentCtx
    return places


def _types(input: Any, start: int, end: int) -> tuple[int, ...]:
    return tuple([token.type for token in input.tokens[start:end]])


class _Form:
    """A tree and the tokens in it."""

    def __init__(self, tree: Any, tokens: list[Any]) -> None:
        self.tree, self._tokens = tree, tokens

    def hold(self, tokens: list[Any]) -> None:
        """From here on it is the tree of another text, which has the same types of tokens."""
        for mine, other in zip(self._tokens, tokens, strict=True):
            mine.source, mine.start, mine.stop, mine._text = other.source, other.start, other.stop, other._text
            mine.line, mine.column = other.line, other.column


class _Reader:
    """What math-verify takes for a parser."""

    known: ClassVar[dict[tuple[int, ...], _Form]] = {}
    """By the types of all tokens; without those that are in use."""

    def __init__(self, parser: Any, in_use: list[tuple[tuple[int, ...], _Form]]) -> None:
        self._parser, self._in_use = parser, in_use

    def math(self) -> Any:
        """The tree of the whole text."""
        tokens = self._parser.getTokenStream().tokens
        types = _types(self._parser.getTokenStream(), 0, len(tokens))
        form = self.known.pop(types, None)
        if form is None:
            form = _Form(self._parser.math(), tokens)
        else:
            form.hold(tokens)
        self._in_use.append((types, form))
        return form.tree


def _create_parser(self: Any, text: str) -> Any:
    parser = _build_parser(self, text)
    try:
        parser.getTokenStream().fill()
    except Exception:  # not even words: let it fail where it fails
        return _build_parser(self, text)
    parser._interp = _Predictor(parser, parser.atn, parser.decisionsToDFA, parser.sharedContextCache)
    return _Reader(parser, self.__dict__.setdefault("_forms_in_use", []))


def _parse(self: Any, text: str) -> Any:
    in_use = self.__dict__.setdefault("_forms_in_use", [])
    mark = len(in_use)  # it calls itself for the parts of some texts
    try:
        return _read(self, text)
    finally:
        if len(_Reader.known) >= _MAX_FORMS:
            _Reader.known.clear()
        _Reader.known.update(in_use[mark:])
        del in_use[mark:]


def _parse_number(self: Any, text: str) -> Any:
    digits = text.replace(",", "")
    if len(digits) > _MAX_DIGITS or not digits.isascii() or not digits.replace(".", "", 1).isdigit():
        return _read_number(self, text)
    return sympy.Float(digits) if "." in digits else sympy.Integer(int(digits))


_build_parser, _read, _read_number = _Latex2Sympy.create_parser, _Latex2Sympy.parse, _Latex2Sympy.parse_number


def install() -> None:
    """From here on math-verify reads quickly, in this process and its forks."""
    _Latex2Sympy.create_parser, _Latex2Sympy.parse, _Latex2Sympy.parse_number = _create_parser, _parse, _parse_number


def uninstall() -> None:
    """As it was."""
    _Latex2Sympy.create_parser, _Latex2Sympy.parse, _Latex2Sympy.parse_number = _build_parser, _read, _read_number
