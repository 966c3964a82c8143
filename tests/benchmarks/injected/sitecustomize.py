"""Puts a CPU clock around what measures, in every process of a run: Python imports this at its start.

Consumes    ROCSTAR_CLOCKED, a folder; modules as they are imported
Produces    FOLDER/PID.json: CPU-seconds of the thread inside the functions of PARTS, by function, with how many calls
            were clocked and how many only passed through; what a call of either kind costs by itself
Waits for   nothing
Invariant   nested functions count once, with the outermost; what runs is otherwise what runs without it. Imports the
            standard library only
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from types import ModuleType
from typing import Any

PARTS = {
    "buffer.meters": (
        "Meters.snapshot Meters.count Meters.gauge Meters.observe StateClock.enter Histogram.observe Histogram.snapshot"
    ),
    "buffer.usage": "Usage.read",
    "buffer.metrics_log": "append",
    "buffer.report": "status standing",
    "buffer.run_state": "RunState.put_meters",
    "buffer.server": "BufferServer._log",
    "buffer.client": "BufferClient.heartbeat BufferClient.status",
    "buffer.service": "Service._heartbeat",
    "actors.rollout_figures": "count_turn count_outcome count_swap show_occupancy MeteredEngine._change",
    "actors.engine": "Engine.occupancy",
    "actors.rollout": "RolloutActor._tell_clock",
    "learner.step_log": "StepLog.step",
    "sandbox.server": "SandboxServer.snapshot",
    "sandbox.dispatch": "Dispatch._count",
    "launch.bodies": "_sandbox_snapshot",
    "launch.progress": "Progress.show",
    "launch.reports": "Reports.update",
}
"""module -> what of it records, sends or shows figures"""
RECEIVED = ("buffer.meters.Meters.snapshot", "launch.bodies._sandbox_snapshot")
"""their results are unpacked once more, as the buffer does; packing them is a part of the heartbeat"""
ANSWERED = ("buffer.report.status",)
"""these are packed once more, as the buffer does; unpacking them is a part of asking"""
WRITE_EVERY_S = 0.5

TRIES = 2000

_spent: dict[str, list[float]] = {}
_inside = threading.local()
_written = [0.0]


def _account(name: str, seconds: float, nested: int) -> None:
    entry = _spent.setdefault(name, [0, 0.0, 0])
    entry[0] += 1
    entry[1] += seconds
    entry[2] += nested
    now_s = time.monotonic()
    if now_s - _written[0] > WRITE_EVERY_S:
        _written[0] = now_s
        path = os.path.join(os.environ["ROCSTAR_CLOCKED"], f"{os.getpid()}.json")
        with open(f"{path}.new", "w") as file:
            told = {"role": os.environ.get("ROCSTAR_ROLE", "driver"), "spent": _spent.copy(), "own_s": _own}
            json.dump(told, file)
        os.replace(f"{path}.new", path)


def _account_travel(name: str, record: Any) -> None:
    import msgpack

    begun_s = time.thread_time()
    body = msgpack.packb(record, default=str)
    packed_s = time.thread_time()
    msgpack.unpackb(body, strict_map_key=False)
    unpacked_s = time.thread_time()
    _account(f"{name}, on its way", unpacked_s - packed_s if name in RECEIVED else packed_s - begun_s, 0)


def _clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def clocked_steps(*args: Any, **kwargs: Any) -> Any:
            return await _Steps(name, function(*args, **kwargs))

        return clocked_steps

    def clocked(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "deep", False):
            _inside.nested += 1
            return function(*args, **kwargs)
        _inside.deep, _inside.nested = True, 0
        begun_s = time.thread_time()
        try:
            result = function(*args, **kwargs)
        finally:
            spent_s = time.thread_time() - begun_s
            _inside.deep = False
            _account(name, spent_s, _inside.nested)
        if name in RECEIVED or name in ANSWERED:
            _account_travel(name, result)
        return result

    return functools.wraps(function)(clocked) if hasattr(function, "__name__") else clocked


class _Steps:
    """A coroutine's steps; what runs while it waits is not its own."""

    def __init__(self, name: str, coroutine: Awaitable[Any]) -> None:
        self._name, self._coroutine = name, coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        inner: Any = self._coroutine.__await__()
        value, error = None, None
        while True:
            step = functools.partial(inner.send, value) if error is None else functools.partial(inner.throw, error)
            try:
                future = _clocked(self._name, step)()
            except StopIteration as end:
                return end.value
            try:
                value, error = (yield future), None
            except BaseException as raised:
                value, error = None, raised


class _Loader(importlib.abc.Loader):
    """Loads a module as it would have been, then puts clocks on it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for path in PARTS[module.__name__].split():
            owner: Any = module
            *outer, name = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            setattr(owner, name, _clocked(f"{module.__name__}.{path}", getattr(owner, name)))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in PARTS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


def _calibrate() -> list[float]:
    """CPU-seconds that a clocked call of nothing shows, and that one more inside another adds."""
    nothing = _clocked("nothing", lambda: None)

    def many() -> None:
        for _ in range(TRIES):
            nothing()

    _written[0] = float("inf")
    many()
    clocked_s = _spent["nothing"][1] / TRIES
    _clocked("many", many)()
    _clocked("bare", lambda: [None for _ in range(TRIES)])()
    nested_s = (_spent["many"][1] - _spent["bare"][1]) / TRIES
    _spent.clear()
    _written[0] = 0.0
    return [clocked_s, max(0.0, nested_s)]


_own: list[float] = []
if os.environ.get("ROCSTAR_CLOCKED"):
    _own += _calibrate()
    sys.meta_path.insert(0, _Finder())
