"""TensorBoard's files read back: by protobuf's own decoder, with the checksums that TensorBoard compares."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from launch.monitor.readings import read_directory
from launch.reports import Reports
from launch.tensorboard import TensorBoard, record, scalars
from launch.tree import MetricsTable
from tests.recorded import ROOT

FIELDS = {
    "Value": (("tag", 1, "STRING", ""), ("simple_value", 2, "FLOAT", "")),
    "Summary": (("value", 1, "MESSAGE", "Value"),),
    "Event": (
        ("wall_time", 1, "DOUBLE", ""),
        ("step", 2, "INT64", ""),
        ("file_version", 3, "STRING", ""),
        ("summary", 5, "MESSAGE", "Summary"),
    ),
}
"""the part of tensorflow/core/util/event.proto that is written"""


def event_class() -> Any:
    file = descriptor_pb2.FileDescriptorProto(name="event.proto", package="t", syntax="proto3")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, of in fields:
            label = "LABEL_REPEATED" if name == "Summary" else "LABEL_OPTIONAL"
            added = message.field.add(name=field, number=number)
            added.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind}")
            added.label = getattr(descriptor_pb2.FieldDescriptorProto, label)
            if of:
                added.type_name = f".t.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("t.Event"))


def crc32c(data: bytes) -> int:
    """Bit by bit, from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read(path: Path) -> Iterator[Any]:
    data, event = path.read_bytes(), event_class()
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        assert struct.unpack_from("<I", data, at + 8)[0] == masked(data[at : at + 8])
        body = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 12 + length)[0] == masked(body)
        yield event.FromString(body)
        at += 16 + length


def statuses() -> list[tuple[dict[str, Any], float]]:
    """Of the recorded run."""
    out = []
    for reading in read_directory(ROOT / "finished").readings:
        peers = {
            name: peer | {"snapshot": dict(reading.roles.get(name, {}))}
            for name, peer in reading.standing["peers"].items()
        }
        status = {**reading.standing, "peers": peers, "buffer": dict(reading.roles["buffer-0"])}
        out.append((status, reading.unix_s))
    return out


def test_the_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    framed = record(b"123456789")
    assert struct.unpack("<I", framed[-4:])[0] == masked(b"123456789")


def test_each_new_step_is_written_once_and_reads_back(tmp_path: Path) -> None:
    with TensorBoard(tmp_path, enabled=True) as board:
        for status, unix_s in statuses():
            board.update(status, unix_s)
            board.update(status, unix_s)
    (path,) = (tmp_path / "tensorboard").iterdir()
    first, *events = read(path)
    assert first.file_version == "brain.Event:2"
    steps = [event.step for event in events]
    assert len(steps) >= 3
    assert steps == sorted(set(steps))
    assert steps[-1] == 8
    told = {value.tag: value.simple_value for value in events[-1].summary.value}
    assert told["learner/lr"] == pytest.approx(2e-4)
    assert told["run/groups_trained_per_min"] > 0
    assert sum(value for tag, value in told.items() if tag.startswith("clock/learner-0/")) == pytest.approx(1.0)


def test_nothing_is_written_unless_it_is_asked_for(tmp_path: Path) -> None:
    with Reports(MetricsTable(), tmp_path) as reports:
        reports.update(statuses()[-1][0])
    assert list(tmp_path.iterdir()) == []
    with Reports(MetricsTable(tensorboard=True), tmp_path) as reports:
        reports.update({})
        reports.update(statuses()[-1][0])
    assert len(list(read(next((tmp_path / "tensorboard").iterdir())))) == 2


def test_before_anything_is_known_there_is_little_to_tell() -> None:
    reading = read_directory(ROOT / "finished").readings[-1]
    assert "learner/loss" in scalars(None, reading)
