"""Records of the wire drawn from their type hints alone: shared by the tests of the codec and of the buffer."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

import numpy as np
from hypothesis import strategies as st

from buffer import schema

RECORDS = [record for record in vars(schema).values() if dataclasses.is_dataclass(record) and isinstance(record, type)]
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(0, 3) | st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=20),
    bool: st.booleans(),
    type(None): st.none(),
    Any: st.integers(-5, 5) | st.text(max_size=5) | st.none(),
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type hint."""
    hint = type(None) if hint is None else hint
    if hint in PLAIN:
        return PLAIN[hint]
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(values(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=3)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, arguments))
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is np.ndarray:
        dtype = np.dtype(typing.get_args(arguments[1])[0])
        return st.binary(max_size=24).map(lambda b: np.frombuffer(b[: len(b) // 4 * 4], np.int32).astype(dtype))
    hints = typing.get_type_hints(hint)
    return st.builds(hint, **{field.name: values(hints[field.name]) for field in dataclasses.fields(hint)})
