"""The sandbox's pure parts: statuses, texts, output windows, queue, placement, wire, filter."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox import seccomp, wire
from sandbox.api import INFRA, KEEP_BYTES, Call, Check, Limits, Result, Status, is_failure, is_infra
from sandbox.dispatch import Dispatch, Entry
from sandbox.output import HeadTail
from sandbox.queue import FairQueue
from sandbox.settings import SandboxSettings

LIMITS = Limits()


def test_each_status_is_success_failure_or_the_sandboxs_own() -> None:
    failures = {status for status in Status if is_failure(status)}
    assert failures.isdisjoint(INFRA)
    assert {status for status in Status if is_infra(status)} == INFRA
    assert set(Status) - failures - INFRA == {Status.OK, Status.SESSION_LOST}


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (Result(id="", status=Status.OK, stdout="42\n"), "42"),
        (Result(id="", status=Status.ERROR, exception="NameError: name 'prnt' is not defined", line=1),
         "NameError: name 'prnt' is not defined (line 1)"),
        (Result(id="", status=Status.TIMEOUT, stdout="1\n"), "1\ntimed out"),
        (Result(id="", status=Status.EXIT, exit_code=1, stderr="sorry\n"), "sorry\nexit code 1"),
        (Result(id="", status=Status.SIGNAL, signal=11), "killed by signal 11"),
        (Result(id="", status=Status.MALFORMED, exception="no JSON"), "no JSON"),
        (Result(id="", status=Status.OVERLOADED), "tool unavailable (overloaded)"),
    ],
)  # fmt: skip
def test_the_text_for_the_model_is_short(result: Result, text: str) -> None:
    assert result.to_text() == text


def test_every_status_but_success_has_a_line() -> None:
    for status in set(Status) - {Status.OK}:
        assert Result(id="", status=status).to_text(), status


@given(st.lists(st.binary(max_size=3 * KEEP_BYTES), max_size=6))
def test_head_and_tail_are_those_of_the_whole(chunks: list[bytes]) -> None:
    window = HeadTail()
    for chunk in chunks:
        window.add(chunk)
    whole = b"".join(chunks)
    assert window.total == len(whole)
    assert window.truncated == (len(whole) > 2 * KEEP_BYTES)
    text = window.text()
    if not window.truncated:
        assert text == whole.decode("utf-8", "replace")
    else:
        assert text.startswith(whole[: KEEP_BYTES - 4].decode("utf-8", "replace")[:-4])
        assert f"... {len(whole) - 2 * KEEP_BYTES} bytes left out ..." in text
        assert text.endswith(whole[-100:].decode("utf-8", "replace")[4:])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=60))
def test_tenants_take_turns_and_priorities_go_first(pushes: list[tuple[str, int]]) -> None:
    queue: FairQueue[tuple[str, int, int]] = FairQueue()
    for order, (tenant, priority) in enumerate(pushes):
        queue.push(tenant, priority, (tenant, priority, order))
    popped = [queue.pop() for _ in pushes]
    assert queue.pop() is None
    for tenant in "abc":
        own = [item for item in popped if item is not None and item[0] == tenant]
        assert own == sorted(own, key=lambda item: (-item[1], item[2]))
    for end in range(len(popped)):
        counts = {t: sum(item is not None and item[0] == t for item in popped[:end]) for t in "abc"}
        waiting = [t for t in "abc" if any(item is not None and item[0] == t for item in popped[end:])]
        assert all(counts[a] - counts[b] <= 1 for a in "abc" for b in waiting)


class _Place:
    def __init__(self, credit: int) -> None:
        self.credit = credit
        self.held: set[int] = set()
        self.sent: list[tuple[object, ...]] = []

    def send(self, *message: object) -> None:
        self.sent.append(message)


def _dispatch(bound: int = 10) -> tuple[Dispatch, list[tuple[str, object]]]:
    delivered: list[tuple[str, object]] = []

    def deliver(entry: Entry) -> None:
        outcome = entry.outcome
        delivered.append((entry.work.id, outcome.status if isinstance(outcome, Result) else outcome))

    return Dispatch(bound, deliver), delivered


def _add(dispatch: Dispatch, name: str, now_s: float = 0.0) -> None:
    dispatch.add("run", b"client", Call(id=name, code="1", limits=LIMITS), 0, now_s)


def _ok(number: int) -> Result:
    return Result(id=str(number), status=Status.OK)


def test_work_goes_where_credit_is_and_no_further() -> None:
    dispatch, _ = _dispatch()
    for name in "abcde":
        _add(dispatch, name)
    places = [_Place(1), _Place(2)]
    dispatch.place([*places])
    assert [len(place.sent) for place in places] == [1, 2]
    assert dispatch.num_waiting == 2


def test_an_id_is_run_once_and_its_result_kept_until_acknowledged() -> None:
    dispatch, delivered = _dispatch()
    place = _Place(9)
    _add(dispatch, "a")
    _add(dispatch, "a")
    dispatch.place([place])
    assert len(place.sent) == 1
    dispatch.finish(1, _ok(1), 1.0)
    _add(dispatch, "a")
    assert delivered == [("a", Status.OK)] * 2
    dispatch.acknowledge("run", "a")
    _add(dispatch, "a")
    dispatch.place([place])
    assert len(place.sent) == 2


def test_lost_work_is_placed_once_more_before_what_waits_then_given_up() -> None:
    dispatch, delivered = _dispatch()
    place = _Place(1)
    _add(dispatch, "a")
    _add(dispatch, "b")
    dispatch.place([place])
    dispatch.lose([1], 1.0)
    place.credit = 1
    dispatch.place([place])
    assert [message[1] for message in place.sent] == [1, 1]
    dispatch.lose([1], 2.0)
    assert delivered == [("a", Status.WORKER_LOST)]
    dispatch.finish(1, _ok(1), 3.0)
    assert len(delivered) == 1, "a late result of what was given up is ignored"


def test_beyond_the_bound_work_is_refused_and_not_remembered() -> None:
    dispatch, delivered = _dispatch(bound=2)
    for name in "abc":
        _add(dispatch, name)
    assert delivered == [("c", Status.OVERLOADED)]
    dispatch.place([_Place(9)])
    _add(dispatch, "c")
    assert dispatch.num_waiting == 1


def test_answers_travel_in_batches_and_a_suspect_alone() -> None:
    dispatch, _ = _dispatch(bound=100)
    for number in range(40):
        dispatch.add("run", b"c", Check(id=str(number), answer="x", gold="y"), 0, 0.0)
    place = _Place(2)
    dispatch.place([place])
    assert [len(message[1]) for message in place.sent] == [32, 8]  # type: ignore[arg-type]
    dispatch.lose([3, 4], 1.0)
    place.credit = 2
    dispatch.place([place])
    assert [[item[0] for item in message[1]] for message in place.sent[2:]] == [[3], [4]]  # type: ignore[attr-defined]


def test_a_cell_goes_to_its_session_or_is_lost() -> None:
    dispatch, delivered = _dispatch()
    one, two = _Place(1), _Place(5)

    def cell(name: str, first: bool) -> None:
        call = Call(id=name, code="1", limits=LIMITS, session="s", first=first)
        dispatch.add("run", b"c", call, 0, 0.0)
        dispatch.place([one, two])

    cell("a", False)
    assert delivered == [("a", Status.SESSION_LOST)]
    cell("b", True)
    two.credit = 0
    cell("c", False)
    assert [message[1] for message in two.sent] == [2, 3], "without credit, as it can go nowhere else"
    dispatch.drop_place(two, 1.0)
    assert delivered[1:] == [("c", Status.SESSION_LOST)], "the first cell may begin anew elsewhere"


def test_unacknowledged_results_are_dropped_after_their_time() -> None:
    dispatch, _ = _dispatch()
    _add(dispatch, "a")
    dispatch.place([_Place(1)])
    dispatch.finish(1, _ok(1), 10.0)
    dispatch.expire(10.0 + 119)
    assert "1" not in dispatch._finished
    assert len(dispatch._finished) == 1
    dispatch.expire(10.0 + 121)
    assert not dispatch._finished
    assert not dispatch._entries


def test_the_wire_returns_what_was_sent() -> None:
    call = Call(id="a", code="x\u00e9", input="y", limits=Limits(wall_s=1.5, memory_mib=7), session="s", first=True)
    assert wire.read_call(wire.unpack(wire.pack("run", wire.call_fields(call, 3)))[1], LIMITS) == (call, 3)
    result = Result(id="a", status=Status.ERROR, stdout="o", exception="E", line=3, truncated=True, run_s=0.5)
    assert wire.read_result(wire.unpack(wire.pack("results", wire.result_fields(result)))[1]) == result


@given(st.binary(max_size=200))
def test_junk_on_the_wire_is_malformed_and_nothing_else(body: bytes) -> None:
    try:
        parts = wire.unpack(body)
    except wire.Malformed:
        return
    with pytest.raises(wire.Malformed):
        wire.read_call(parts[1:], LIMITS)


@pytest.mark.parametrize("bounds", [[0, 1, 1, 1], [1, 1, 1], [1, 1, "1", 1], [1e9, 1, 1, 1], [1, float("nan"), 1, 1]])
def test_limits_that_are_none_are_refused(bounds: list[object]) -> None:
    with pytest.raises(wire.Malformed):
        wire.read_call(["a", "1", "", bounds, 0, "", False], LIMITS)


def _verdict(program: bytes, number: int, argument: int = 0, second: int = 0, arch: int = 0xC000_003E) -> int:
    """Run a filter program as the kernel would."""
    data = struct.pack("<IIQQQ", number, arch, 0, argument, second)
    steps = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    at, value = 0, 0
    while True:
        code, jump_true, jump_false, k = steps[at]
        at += 1
        if code == 0x06:
            return int(k)
        if code == 0x20:
            value = struct.unpack_from("<I", data, k)[0]
        else:
            hit = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += jump_true if hit else jump_false


def test_the_filter_allows_lists_and_nothing_else() -> None:
    allow, eperm, eacces, enosys, kill = 0x7FFF0000, 0x50001, 0x5000D, 0x50026, 0x80000000
    program = seccomp.assemble()
    for number in (0, 1, 9, 59, 62, 202, 231, 257, 334, 436):
        assert _verdict(program, number) == allow, number
    for number in (101, 155, 161, 165, 166, 246, 250, 272, 298, 304, 308, 310, 313, 317, 321, 323):
        assert _verdict(program, number) == eperm, number
    for number in (41, 42, 43, 49, 50, 288):
        assert _verdict(program, number) == eacces, number
    for number in (425, 435, 438, 442, 500, 1 << 30, 0xFFFFFFFF):
        assert _verdict(program, number) == enosys, number
    assert _verdict(program, 56, 0x11) == allow
    assert _verdict(program, 56, 0x10000011) == eperm
    assert _verdict(program, 53, 1) == allow
    assert _verdict(program, 53, 2) == eacces
    assert _verdict(program, 16, 1, 0x5412) == eperm
    assert _verdict(program, 16, 1, 0x541B) == allow
    assert _verdict(program, 0, arch=0x40000003) == kill
    assert _verdict(seccomp.assemble(keep_group=True), 112) == eperm
    assert _verdict(seccomp.assemble(keep_group=True), 62, 0xFFFFFFFF) == eperm
    assert _verdict(program, 112) == allow


def test_the_dials_are_these_and_wrong_ones_are_refused() -> None:
    assert set(SandboxSettings.model_fields) == {
        "workers", "wall_s", "cpu_s", "memory_mib", "output_kib", "queue_bound", "sessions", "spare", "isolation",
        "profile", "preamble",
    }  # fmt: skip
    for wrong in ({"wall_s": 0}, {"isolation": "none"}, {"workrs": 2}, {"memory_mib": 1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SandboxSettings.model_validate(wrong)
