"""Strict coding of the records of buffer.schema: msgpack for the fields, raw little-endian bytes for the arrays.

Consumes    a value and its type hint (a record, a tuple, an optional, a plain type)
Produces    (body, payload) and back; `CodecError` for anything else, whatever the bytes
Imports     nothing of ours; every package may import this file
Invariant   decode(hint, *encode(hint, value)) equals value; no input makes decode raise anything but CodecError

A record is the msgpack array of its fields in order, nested alike: positional, no names, no defaults. An array field
is its element count in the body; its bytes lie in the payload, in the order in which counts appear in the body, each
array padded with zeros to a multiple of 4 bytes (so that the next is aligned). Never pickle.

Example:
    body, payload = encode(Turn, turn)
    turn = decode(Turn, body, payload)          # arrays are read-only views of payload unless writable=True
    leases = decode(tuple[Lease, ...], body, payload)
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
import types
import typing
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import msgpack
import numpy as np

MAX_BODY_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 256 << 20
MAX_ITEMS = 1 << 18
"""of one sequence, text and counts apart"""
MAX_INT = 2**63 - 1

Arrays: TypeAlias = list[bytes]
_Encode: TypeAlias = Callable[[Any, Any], Any]
"""(value, arrays so far) -> plain value"""
_Decode: TypeAlias = Callable[[Any, Any], Any]
"""(plain value, reader of the payload) -> value"""
_DTYPES = {np.dtype(np.int32): "<i4", np.dtype(np.float32): "<f4", np.dtype(np.bool_): "|b1"}


class CodecError(ValueError):
    """Bytes or a value that are not the record they should be; names the field, the value and the bound."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(f"{field} {message}" if field else message)
        self.message, self.field = message, field

    def inside(self, outer: str) -> CodecError:
        """The same fault, seen from the record that holds it."""
        return CodecError(self.message, f"{outer}.{self.field}" if self.field else outer)


class _Reader:
    """Hands out the arrays of a payload, in order."""

    __slots__ = ("offset", "payload", "writable")

    def __init__(self, payload: Any, writable: bool) -> None:
        self.payload, self.writable, self.offset = payload, writable, 0

    def take(self, dtype: np.dtype[Any], count: int) -> Any:
        num_bytes = count * dtype.itemsize
        end = self.offset + num_bytes
        if end > len(self.payload):
            raise CodecError(f"has {count} elements, {len(self.payload) - self.offset} bytes of payload are left")
        array = np.frombuffer(self.payload, dtype, count, self.offset) if count else np.empty(0, dtype)
        if dtype.kind == "b" and count and array.view(np.uint8).max() > 1:
            raise CodecError("holds a byte that is neither 0 nor 1")
        self.offset = end + -num_bytes % 4
        return array.copy() if self.writable else array


def encode(hint: Any, value: Any) -> tuple[bytes, bytes]:
    """Body and payload of `value`, which `hint` describes."""
    arrays: Arrays = []
    try:
        body: bytes = msgpack.packb(_coder(hint)[0](value, arrays), use_bin_type=True)
    except CodecError:
        raise
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise CodecError(f"cannot be encoded: {error}", str(hint)) from error
    return body, b"".join(arrays)


def decode(
    hint: Any,
    body: bytes | memoryview,
    payload: bytes | memoryview = b"",
    *,
    writable: bool = False,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> Any:
    """The value of `hint` that `body` and `payload` hold.

    Raises:
        CodecError: they hold none; nothing else is raised, whatever they are.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise CodecError(f"of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}", "payload")
    plain = unpack(body, max_body_bytes)
    reader = _Reader(payload, writable)
    value = _coder(hint)[1](plain, reader)
    if reader.offset != len(payload):
        raise CodecError(f"has {len(payload)} bytes, the counts in the body say {reader.offset}", "payload")
    return value


def unpack(body: bytes | memoryview, max_body_bytes: int = MAX_BODY_BYTES) -> Any:
    """The plain value of a body, within limits."""
    if len(body) > max_body_bytes:
        raise CodecError(f"of {len(body)} bytes exceeds {max_body_bytes}", "body")
    try:
        return msgpack.unpackb(
            body,
            max_str_len=max_body_bytes,
            max_bin_len=max_body_bytes,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise CodecError(f"of {len(body)} bytes is no msgpack value: {error}", "body") from error


def _bad(value: Any, expected: str) -> CodecError:
    text = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else reprlib.repr(value)
    return CodecError(f"= {text} is not {expected}")


def _int(value: Any, _: Any) -> int:
    if type(value) is not int or not -MAX_INT - 1 <= value <= MAX_INT:
        raise _bad(value, "an integer of 64 bits")
    return value


def _float(value: Any, _: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise _bad(value, "a finite float")
    return value


def _encode_float(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)) or not math.isfinite(value):
        raise _bad(value, "a finite number")
    return float(value)


def _exactly(kind: type, expected: str) -> tuple[_Encode, _Decode]:
    def check(value: Any, _: Any) -> Any:
        if type(value) is not kind:
            raise _bad(value, expected)
        return value

    return check, check


_PLAIN: dict[Any, tuple[_Encode, _Decode]] = {
    int: (lambda value, _: _int(int(value) if isinstance(value, np.integer) else value, _), _int),
    float: (_encode_float, _float),
    bool: _exactly(bool, "a bool"),
    str: _exactly(str, "text"),
    None: _exactly(type(None), "nil"),
    Any: (lambda value, _: value, lambda value, _: value),
}


@cache
def _coder(hint: Any) -> tuple[_Encode, _Decode]:
    """The two directions for a type hint, built once."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _record(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return _sequence(arguments[0]) if len(arguments) == 2 and arguments[1] is Ellipsis else _tuple(arguments)
    if origin is dict:
        return _exactly(dict, "a map")
    if origin is np.ndarray:
        return _array(np.dtype(typing.get_args(arguments[1])[0]))
    if origin is typing.Literal:
        return _literal(arguments)
    if origin in (types.UnionType, typing.Union):
        (inner,) = (argument for argument in arguments if argument is not type(None))
        return _optional(inner)
    raise TypeError(f"the codec knows no type {hint!r}")


def _array(dtype: np.dtype[Any]) -> tuple[_Encode, _Decode]:
    wire = _DTYPES[dtype]

    def encode_array(value: Any, arrays: Arrays) -> int:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
            raise _bad(value, f"an array of {dtype} with one axis")
        data = value.astype(wire, copy=False).tobytes()
        arrays.append(data)
        if len(data) % 4:
            arrays.append(bytes(-len(data) % 4))
        return len(value)

    def decode_array(value: Any, reader: _Reader) -> Any:
        if type(value) is not int or not 0 <= value <= MAX_PAYLOAD_BYTES:
            raise _bad(value, "an element count")
        return reader.take(np.dtype(wire), value)

    return encode_array, decode_array


def _literal(allowed: Sequence[Any]) -> tuple[_Encode, _Decode]:
    def check(value: Any, _: Any) -> Any:
        if type(value) is not str or value not in allowed:
            raise _bad(value, "one of " + ", ".join(allowed))
        return value

    return check, check


def _optional(inner: Any) -> tuple[_Encode, _Decode]:
    encode_inner, decode_inner = _coder(inner)
    return (
        lambda value, arrays: None if value is None else encode_inner(value, arrays),
        lambda value, reader: None if value is None else decode_inner(value, reader),
    )


def _sequence(inner: Any) -> tuple[_Encode, _Decode]:
    encode_inner, decode_inner = _coder(inner)

    def over(value: Any, kinds: Any, code: _Encode, other: Any) -> list[Any]:
        if not isinstance(value, kinds):
            raise _bad(value, "a sequence")
        if len(value) > MAX_ITEMS:
            raise CodecError(f"has {len(value)} items, at most {MAX_ITEMS} are allowed")
        out: list[Any] = []
        try:
            for item in value:
                out.append(code(item, other))
        except CodecError as error:
            raise error.inside(f"[{len(out)}]") from None
        return out

    return (
        lambda value, arrays: over(value, (tuple, list), encode_inner, arrays),
        lambda value, reader: tuple(over(value, (list,), decode_inner, reader)),
    )


def _tuple(inner: Sequence[Any]) -> tuple[_Encode, _Decode]:
    coders = [_coder(one) for one in inner]

    def encode_tuple(value: Any, arrays: Arrays) -> list[Any]:
        if not isinstance(value, (tuple, list)) or len(value) != len(coders):
            raise _bad(value, f"a tuple of {len(coders)}")
        return [coder[0](item, arrays) for coder, item in zip(coders, value, strict=True)]

    def decode_tuple(value: Any, reader: _Reader) -> tuple[Any, ...]:
        if type(value) is not list or len(value) != len(coders):
            raise _bad(value, f"a tuple of {len(coders)}")
        return tuple([coder[1](item, reader) for coder, item in zip(coders, value, strict=True)])

    return encode_tuple, decode_tuple


def _record(cls: type) -> tuple[_Encode, _Decode]:
    hints = typing.get_type_hints(cls)
    names = [field.name for field in dataclasses.fields(cls)]
    coders = [_coder(hints[name]) for name in names]
    encoders = [(name, coder[0]) for name, coder in zip(names, coders, strict=True)]
    decoders = [(name, coder[1]) for name, coder in zip(names, coders, strict=True)]

    def encode_record(value: Any, arrays: Arrays) -> list[Any]:
        if type(value) is not cls:
            raise _bad(value, f"a {cls.__name__}")
        name = ""
        try:
            out = []
            for name, code in encoders:
                out.append(code(getattr(value, name), arrays))
        except CodecError as error:
            raise error.inside(f"{cls.__name__}.{name}") from None
        return out

    def decode_record(value: Any, reader: _Reader) -> Any:
        if type(value) is not list or len(value) != len(decoders):
            raise _bad(value, f"a list of {len(decoders)} fields").inside(cls.__name__)
        fields: dict[str, Any] = {}
        name = ""
        try:
            for (name, code), item in zip(decoders, value, strict=True):
                fields[name] = code(item, reader)
        except CodecError as error:
            raise error.inside(f"{cls.__name__}.{name}") from None
        return cls(**fields)

    return encode_record, decode_record
