"""The codec's round-trip law, and that no bytes make it raise anything but CodecError."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.codec import CodecError, decode, encode
from buffer.schema import Finish, Lease, Trajectory, Turn, VersionRun, WeightsManifest
from tests.records import RECORDS, values


def same(left: Any, right: Any) -> bool:
    if dataclasses.is_dataclass(left):
        names = [field.name for field in dataclasses.fields(left)]
        return type(left) is type(right) and all(same(getattr(left, n), getattr(right, n)) for n in names)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    if isinstance(left, tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right) and type(left) is type(right)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_a_record_read_back_equals_the_record_written(record: type) -> None:
    @settings(max_examples=40, deadline=None)
    @given(values(record))
    def law(value: Any) -> None:
        body, payload = encode(record, value)
        assert same(decode(record, body, payload), value)
        assert same(decode(record, body, payload, writable=True), value)

    law()


def turn(**changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "group": 7,
        "rollout": 3,
        "attempt": 2,
        "turn": 1,
        "prompt_ids": np.arange(4, dtype=np.int32),
        "output_ids": np.arange(3, dtype=np.int32),
        "logprobs": np.full(3, -0.5, np.float32),
        "version_runs": (VersionRun(lineage=1, version=5, num_tokens=3),),
        "observation_ids": np.arange(2, dtype=np.int32),
    }
    return Turn(**(fields | changes))


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=64), st.sampled_from(RECORDS))
def test_random_bytes_raise_nothing_but_codec_errors(body: bytes, payload: bytes, record: type) -> None:
    with pytest.raises(CodecError):
        decode(record, body, payload)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_mutated_turn_is_refused_or_is_a_turn(data: st.DataObject) -> None:
    body, payload = encode(Turn, turn(code="print(1)", observation="1"))
    frame = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    try:
        value = decode(Turn, bytes(frame), payload[:cut] if data.draw(st.booleans()) else payload)
    except CodecError:
        return
    assert type(value) is Turn


@pytest.mark.parametrize(
    "plain",
    [None, 0, "x", [], {}, [1] * 100, {"group": 1}, [[]] * 15, b"x" * 50, [None] * 15, [True] * 15, [2**63] * 15],
)
def test_wrong_shapes_are_refused(plain: Any) -> None:
    for record in (Turn, Finish, Lease, WeightsManifest):
        with pytest.raises(CodecError):
            decode(record, msgpack.packb(plain))


def test_deep_nesting_ext_types_and_great_counts_are_refused() -> None:
    deep = b"\x91" * 100_000 + b"\xc0"
    huge = b"\xdd\xff\xff\xff\xff"
    for body in (deep, huge, b"\xd6\xff\x00\x00\x00\x00", b"\xdb\xff\xff\xff\xff", b"", msgpack.packb([1]) * 2):
        with pytest.raises(CodecError):
            decode(Turn, body)


def test_errors_name_field_value_and_bound() -> None:
    with pytest.raises(CodecError, match=r"Turn\.logprobs = float64\[3\] is not an array of float32"):
        encode(Turn, turn(logprobs=np.zeros(3)))
    with pytest.raises(CodecError, match=r"Turn\.version_runs\.\[0\]\.VersionRun\.version = 'x' is not an integer"):
        encode(Turn, turn(version_runs=(VersionRun(lineage=1, version="x", num_tokens=1),)))  # type: ignore[arg-type]
    body, payload = encode(Turn, turn())
    with pytest.raises(CodecError, match="payload has 52 bytes, the counts in the body say 48"):
        decode(Turn, body, payload + bytes(4))
    with pytest.raises(CodecError, match=r"Turn\.observation_ids has 2 elements, 4 bytes of payload are left"):
        decode(Turn, body, payload[:-4])
    with pytest.raises(CodecError, match=r"body of \d+ bytes exceeds 10"):
        decode(Turn, body, payload, max_body_bytes=10)


def test_numbers_are_not_guessed() -> None:
    with pytest.raises(CodecError, match="generate_s = nan is not a finite"):
        encode(Turn, turn(generate_s=math.nan))
    with pytest.raises(CodecError, match="group = True is not an integer"):
        encode(Turn, turn(group=True))
    assert decode(Turn, *encode(Turn, turn(generate_s=1, turn=np.int64(4)))).generate_s == 1.0
    body = msgpack.packb([1, 0, True])
    with pytest.raises(CodecError):
        decode(tuple[int, int, int], body)


def test_arrays_are_aligned_views_and_copies_when_asked() -> None:
    trajectory = Trajectory(
        group=1,
        rollout=2,
        ids=np.arange(5, dtype=np.int32),
        sampled=np.array([False, True, True, False, True]),
        logprobs=np.linspace(-1, 0, 5, dtype=np.float32),
        versions=np.full(5, 3, np.int32),
    )
    body, payload = encode(tuple[Trajectory, ...], (trajectory, trajectory))
    out = decode(tuple[Trajectory, ...], body, payload)
    assert same(out, (trajectory, trajectory))
    assert out[1].logprobs.flags.aligned
    assert not out[1].ids.flags.writeable
    assert decode(tuple[Trajectory, ...], body, payload, writable=True)[1].ids.flags.writeable
    bad = bytearray(payload)
    bad[20] = 2
    with pytest.raises(CodecError, match="neither 0 nor 1"):
        decode(tuple[Trajectory, ...], body, bytes(bad))


def test_padding_must_be_there() -> None:
    body, payload = encode(Trajectory, decode(Trajectory, *_tiny()))
    assert len(payload) % 4 == 0
    with pytest.raises(CodecError):
        decode(Trajectory, body, payload[:-1])


def _tiny() -> tuple[bytes, bytes]:
    one = np.ones(1, np.int32)
    return encode(
        Trajectory,
        Trajectory(
            group=1, rollout=1, ids=one, sampled=np.ones(1, np.bool_), logprobs=np.ones(1, np.float32), versions=one
        ),
    )
