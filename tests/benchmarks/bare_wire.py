"""The least that a Python process must do to take turns in durably: the floor beside tests.benchmarks.wire.

Consumes    messages of three frames, as many at a time as the window of a peer allows
Produces    seconds from the first message to the last acknowledgement
Waits for   sockets, the disk
Invariant   the same number of messages and bytes and the same window as the buffer gets; payload appended and synced,
            then one row per message committed and synced (SQLite, WAL, synchronous = FULL), then one acknowledgement
            each, while the next messages come in. Nothing is decoded, checked, counted or leased
"""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

import zmq

_HEAD, _BODY = b"h" * 40, b"b" * 400
MAX_MESSAGES = 256
"""of a commit: writev takes twice as many pieces at once"""
Message: TypeAlias = list[bytes]


class _Disk:
    """A file for payload and a table for rows."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / "bare", os.O_WRONLY | os.O_CREAT)
        self._db = sqlite3.connect(directory / "bare.sqlite", isolation_level=None, check_same_thread=False)
        self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE t (a, b, c, d)")
        self._end = 0

    def commit(self, messages: Sequence[Message]) -> None:
        pieces = [part for _, _, body, payload in messages for part in (body, payload)]
        assert os.writev(self._file, pieces) == sum(map(len, pieces)), "the disk is full"
        os.fdatasync(self._file)
        rows = []
        for route, _, body, payload in messages:
            rows.append((route, self._end, len(body), len(payload)))
            self._end += len(body) + len(payload)
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)
        self._db.execute("COMMIT")


def _serve(directory: Path, total: int, told: Connection) -> None:
    """The process that takes in: its port, then "done"."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.RCVHWM, 0)
    told.send(socket.bind_to_random_port("tcp://127.0.0.1"))
    disk = _Disk(directory)
    writer = ThreadPoolExecutor(1)
    waiting: list[Message] = []
    busy: Future[None] | None = None
    written: list[Message] = []
    done = 0
    while done < total:
        if busy is not None and busy.done():
            busy.result()
            for message in written:
                socket.send_multipart([message[0], message[1], b"ack"])
            done += len(written)
            busy = None
        if busy is None and waiting:
            written, waiting = waiting, []
            busy = writer.submit(disk.commit, written)
        if socket.poll(1 if busy is not None else 50):
            _take_in(socket, waiting)
    told.send("done")
    writer.shutdown()
    socket.close()
    context.term()


def _take_in(socket: zmq.Socket[bytes], waiting: list[Message]) -> None:
    while len(waiting) < MAX_MESSAGES:
        try:
            waiting.append(socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return


def bare(directory: Path, num_messages: int, payload_bytes: int, senders: int, window: int) -> float:
    """Seconds for `num_messages` of `payload_bytes` each from `senders`, each with `window` of them unanswered."""
    spawn = multiprocessing.get_context("spawn")
    mine, its = spawn.Pipe()
    server = spawn.Process(target=_serve, args=(directory, num_messages, its))
    server.start()
    context = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in range(senders)]
    port = mine.recv()
    for socket in sockets:
        socket.connect(f"tcp://127.0.0.1:{port}")
    started_s = time.monotonic()
    _send(sockets, [_HEAD, _BODY, os.urandom(payload_bytes)], num_messages, window)
    spent_s = time.monotonic() - started_s
    mine.recv()
    server.join()
    for socket in sockets:
        socket.close()
    context.term()
    return spent_s


def _send(sockets: Sequence[zmq.Socket[bytes]], frames: Message, num_messages: int, window: int) -> None:
    """Until all are acknowledged."""
    poller = zmq.Poller()
    for socket in sockets:
        poller.register(socket, zmq.POLLIN)
    left = num_messages
    for _ in range(window):
        for socket in sockets[:left]:
            socket.send_multipart(frames)
            left -= 1
    answered = 0
    while answered < num_messages:
        for socket, _ in poller.poll(1000):
            for _ in range(window):
                try:
                    socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                answered += 1
                if left > 0:
                    socket.send_multipart(frames)
                    left -= 1
