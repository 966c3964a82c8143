"""Segments and index: what was committed is there, what was not is cut off, what is not ours is refused."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from buffer.codec import encode
from buffer.index import Index, IndexFault, put_meta
from buffer.restore import open_run
from buffer.run_state import Now
from buffer.schema import SCHEMA, Turn, VersionRun
from buffer.segments import FILE_MAGIC, Place, SegmentError, Segments, record_bytes, scan
from buffer.spare import rebuild
from buffer.storage import Storage, trajectory
from tests.buffers import RUN, problem, settings


def fill(segments: Segments, payloads: list[bytes]) -> list[Place]:
    places = [segments.place(record_bytes(b"body", payload)) for payload in payloads]
    segments.append([(place, b"body", payload) for place, payload in zip(places, payloads, strict=True)])
    return places


def test_records_are_read_back_over_many_segments(tmp_path: Path) -> None:
    segments = Segments(tmp_path, 100, 0, 0)
    payloads = [os.urandom(n) for n in (0, 10, 90, 200, 1, 50, 50, 50)]
    places = fill(segments, payloads[:3]) + fill(segments, payloads[3:])
    assert places[-1].segment > 3
    assert [bytes(payload) for _, payload in segments.read(reversed(places))] == payloads[::-1]
    found = [bytes(payload) for path in sorted(tmp_path.glob("*.seg")) for _, _, payload in scan(path)]
    assert found == payloads
    segments.close()


def test_what_lies_behind_the_last_indexed_record_is_cut_off(tmp_path: Path) -> None:
    segments = Segments(tmp_path, 1000, 0, 0)
    places = fill(segments, [b"one", b"two", b"three", b"never acknowledged either"])
    segments.close()
    (tmp_path / "00000002.seg").write_bytes(FILE_MAGIC + b"begun, never committed")
    end = places[1].offset_bytes + places[1].length_bytes
    again = Segments(tmp_path, 1000, 1, end)
    assert not (tmp_path / "00000002.seg").exists()
    (new,) = fill(again, [b"again"])
    assert new.offset_bytes == end
    assert [bytes(payload) for _, _, payload in scan(tmp_path / "00000001.seg")] == [b"one", b"two", b"again"]
    again.close()


def test_a_torn_or_altered_record_is_never_returned(tmp_path: Path) -> None:
    segments = Segments(tmp_path, 1000, 0, 0)
    places = fill(segments, [b"one", b"two"])
    path = segments.path(1)
    data = bytearray(path.read_bytes())
    for at in range(places[1].offset_bytes, len(data)):
        broken = bytearray(data)
        broken[at] ^= 0x40
        path.write_bytes(broken)
        with pytest.raises(SegmentError, match=r"00000001\.seg at"):
            segments.read([places[1]])
        assert [bytes(payload) for _, _, payload in scan(path)] == [b"one"]
    path.write_bytes(data[:-1])
    with pytest.raises(SegmentError):
        segments.read(places)
    segments.close()
    with pytest.raises(SegmentError, match="the index holds turns up to"):
        Segments(tmp_path, 1000, 1, len(data))
    path.unlink()
    with pytest.raises(SegmentError, match="missing"):
        Segments(tmp_path, 1000, 1, len(data))


def test_only_whole_segments_before_the_present_one_are_deleted(tmp_path: Path) -> None:
    segments = Segments(tmp_path, 10, 0, 0)
    fill(segments, [b"a" * 20, b"b" * 20, b"c" * 20])
    assert segments.delete([1, 3, 9]) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002.seg", "00000003.seg"]
    segments.close()


def test_a_commit_is_whole_or_absent(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite")
    index.commit([put_meta("a", 1), put_meta("b", 2)])
    with pytest.raises(sqlite3.Error):
        index.commit([put_meta("a", 5), ("INSERT INTO batches VALUES (1, NULL, 0, x'')", ())])
    assert index.meta() == {"a": 1, "b": 2}
    index.commit([put_meta("a", 6)])
    assert index.meta()["a"] == 6
    assert index.rows("PRAGMA synchronous") == [(2,)]  # FULL
    index.close()


def test_another_run_another_schema_and_other_sizes_are_refused(tmp_path: Path) -> None:
    now = Now(0.0, 0.0)
    storage = Storage(tmp_path, RUN, 1 << 20)
    storage.commit(open_run(storage, RUN, settings(), problem, (), now, {}).unit)
    storage.close()
    with pytest.raises(IndexFault, match=r"belongs to run 'run-1', not 'other'.*run\.directory"):
        Storage(tmp_path, "other", 1 << 20)
    storage = Storage(tmp_path, RUN, 1 << 20)
    with pytest.raises(IndexFault, match="group_size = 3, the run in this directory has 2"):
        open_run(storage, RUN, settings(group_size=3), problem, (), now, {})
    storage.index.commit([put_meta("schema", SCHEMA + 1)])
    storage.close()
    with pytest.raises(IndexFault, match=f"has schema {SCHEMA + 1}, this program writes {SCHEMA}"):
        Storage(tmp_path, RUN, 1 << 20)


def test_a_file_that_is_no_index_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "buffer" / "index.sqlite"
    path.parent.mkdir()
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(IndexFault, match=r"index\.sqlite cannot be used.*--rebuild-index"):
        Storage(tmp_path, RUN, 1 << 20)
    assert path.read_bytes() == b"not a database at all" * 100


@pytest.mark.slow
def test_a_corrupted_page_is_found_at_the_next_start_and_the_turns_are_in_the_segments(tmp_path: Path) -> None:
    storage = Storage(tmp_path, RUN, 1 << 20)
    unit = open_run(storage, RUN, settings(), problem, (), Now(0.0, 0.0), {}).unit
    unit.statements += [put_meta(f"filler {number}", "x" * 100) for number in range(2000)]
    storage.place(unit, b"body", b"payload")
    storage.commit(unit)
    storage.close()
    path = tmp_path / "buffer" / "index.sqlite"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 8192 * 4096)
        file.write(os.urandom(4096))
    with pytest.raises(IndexFault, match=r"cannot be used.*resume RUN --rebuild-index.*segments/ holds every"):
        Storage(tmp_path, RUN, 1 << 20)
    assert len(list(scan(tmp_path / "buffer" / "segments" / "00000001.seg"))) == 1
    assert "up to commit 1;" in rebuild(tmp_path / "buffer")
    storage = Storage(tmp_path, RUN, 1 << 20)
    assert {storage.index.meta()[f"filler {number}"] for number in range(2000)} == {"x" * 100}
    storage.close()


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), min_size=1, max_size=4))
def test_a_trajectory_is_the_prompt_and_every_turn_without_the_last_observation(
    num_prompt: int, lengths: list[tuple[int, int]]
) -> None:
    turns, expected = [], [(i, False, 0.0, -1) for i in range(num_prompt)]
    for number, (num_output, num_observed) in enumerate(lengths):
        output = [100 * number + i for i in range(num_output)]
        half = num_output // 2
        runs = [VersionRun(lineage=1, version=number, num_tokens=half)] if half else []
        runs += [VersionRun(lineage=1, version=number + 1, num_tokens=num_output - half)] if num_output > half else []
        turns.append(
            Turn(
                group=4,
                rollout=2,
                attempt=1,
                turn=number,
                prompt_ids=np.arange(num_prompt if number == 0 else 0, dtype=np.int32),
                output_ids=np.array(output, np.int32),
                logprobs=np.array([-float(token) for token in output], np.float32),
                version_runs=tuple(runs),
                observation_ids=np.full(num_observed, 7, np.int32),
            )
        )
        expected += [(t, True, -float(t), number + (i >= half)) for i, t in enumerate(output)]
        if number < len(lengths) - 1:
            expected += [(7, False, 0.0, -1)] * num_observed
    built = trajectory(turns)
    columns = (built.ids, built.sampled, built.logprobs, built.versions)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert (built.group, built.rollout) == (4, 2)


def test_the_segment_format_is_what_its_docstring_says(tmp_path: Path) -> None:
    import msgpack

    body, payload = encode(
        Turn,
        Turn(
            group=1,
            rollout=2,
            attempt=3,
            turn=0,
            prompt_ids=np.array([5], np.int32),
            output_ids=np.array([6, 7], np.int32),
            logprobs=np.array([-1, -2], np.float32),
            version_runs=(VersionRun(lineage=8, version=9, num_tokens=2),),
            observation_ids=np.array([4], np.int32),
            code="c",
            status="ok",
            observation="o",
            generate_s=0.5,
        ),
    )
    assert msgpack.unpackb(body) == [1, 2, 3, 0, 1, 2, 2, [[8, 9, 2]], 1, "c", "ok", "o", 0.5, 0.0, 0.0]
    assert payload == np.array([5, 6, 7], "<i4").tobytes() + np.array([-1, -2], "<f4").tobytes() + b"\x04\0\0\0"
