"""The same calls as JSON over HTTP, for outsiders: POST /run, /check, /batch; GET /health.

Consumes    {"code", "input"?, "limits"?} ; {"answer", "gold"} ; {"calls": [...]} of the former
Produces    a result as JSON; for /batch one line of JSON per call as each ends, with its "index"
Waits for   the client's nodes; a request's header and body at most READ_S
Invariant   beyond loopback every request carries the token; a request that is none gets 4xx and costs nothing else
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from dataclasses import asdict, fields
from typing import Any

from sandbox.api import Limits, Result
from sandbox.client import CheckFailed, SandboxClient

READ_S = 30.0
MAX_BODY_BYTES = 64 << 20
_MAX_HEADERS = 100
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_REASONS = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 413: "Too Large", 503: "Unavailable"}


class _Refused(Exception):
    """A request that is not served: HTTP status and reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class HttpFront:
    """An HTTP server before a client of the nodes."""

    def __init__(self, client: SandboxClient, *, token: str = "") -> None:
        """Serve `client`; with a token each request needs `Authorization: Bearer TOKEN`."""
        self._client, self._token = client, token
        self._server: asyncio.Server | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; the port.

        Raises:
            ValueError: beyond loopback without a token.
        """
        if host not in _LOOPBACK and not self._token:
            raise ValueError(f"HTTP on {host} is reachable from other machines: give it a token")
        self._server = await asyncio.start_server(self._serve, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve the requests of one connection, one after the other."""
        with contextlib.suppress(ConnectionError, TimeoutError, asyncio.IncompleteReadError):
            while True:
                try:
                    method, path, body = await asyncio.wait_for(self._read(reader), READ_S)
                    await self._answer(writer, method, path, body)
                except _Refused as error:
                    _write(writer, error.status, {"error": str(error)}, close=True)
                    break
        writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
        line = (await reader.readline()).decode("latin-1").split()
        if not line:
            raise ConnectionError
        if len(line) != 3:
            raise _Refused(400, "not an HTTP request")
        headers: dict[str, str] = {}
        for _ in range(_MAX_HEADERS):
            name, _, value = (await reader.readline()).decode("latin-1").partition(":")
            if not name.strip():
                break
            headers[name.strip().lower()] = value.strip()
        else:
            raise _Refused(400, f"more than {_MAX_HEADERS} headers")
        given = headers.get("authorization", "").encode()
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise _Refused(401, "the token is missing or wrong")
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            raise _Refused(400, "Content-Length is no number")
        if int(length) > MAX_BODY_BYTES:
            raise _Refused(413, f"the body may have {MAX_BODY_BYTES} bytes")
        return line[0], line[1], await reader.readexactly(int(length))

    async def _answer(self, writer: asyncio.StreamWriter, method: str, path: str, body: bytes) -> None:
        if (method, path) == ("GET", "/health"):
            _write(writer, 200, {"ok": True})
        elif (method, path) == ("POST", "/run"):
            _write(writer, 200, await self._run(_object(body)))
        elif (method, path) == ("POST", "/check"):
            _write(writer, 200, await self._check(_object(body)))
        elif (method, path) == ("POST", "/batch"):
            await self._batch(writer, _object(body))
        else:
            raise _Refused(404, "there are GET /health, POST /run, POST /check and POST /batch")
        await writer.drain()

    async def _run(self, request: dict[str, Any]) -> dict[str, Any]:
        code, stdin, limits = _call(request)
        return _shown(await self._client.run(code, stdin, limits=limits))

    async def _check(self, request: dict[str, Any]) -> dict[str, Any]:
        answer, gold = request.get("answer"), request.get("gold")
        if not isinstance(answer, str) or not isinstance(gold, str):
            raise _Refused(400, "answer and gold are texts")
        try:
            return {"verdict": (await self._client.check(answer, gold)).value}
        except CheckFailed as error:
            raise _Refused(503, str(error)) from error

    async def _batch(self, writer: asyncio.StreamWriter, request: dict[str, Any]) -> None:
        """Results as they come, each a chunk with a line of JSON."""
        calls = request.get("calls")
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise _Refused(400, "calls is a list of objects")
        parsed = [_call(call) for call in calls]

        async def one(index: int, code: str, stdin: str, limits: Limits | None) -> dict[str, Any]:
            return {"index": index} | _shown(await self._client.run(code, stdin, limits=limits))

        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n")
        for done in asyncio.as_completed([one(index, *call) for index, call in enumerate(parsed)]):
            line = json.dumps(await done).encode() + b"\n"
            writer.write(b"%x\r\n%b\r\n" % (len(line), line))
            await writer.drain()
        writer.write(b"0\r\n\r\n")


def _write(writer: asyncio.StreamWriter, status: int, answer: dict[str, Any], *, close: bool = False) -> None:
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    writer.write(head.encode() + (b"Connection: close\r\n" if close else b"") + b"\r\n" + body)


def _object(body: bytes) -> dict[str, Any]:
    try:
        request = json.loads(body)
    except ValueError as error:
        raise _Refused(400, f"the body is not JSON: {error}") from error
    if not isinstance(request, dict):
        raise _Refused(400, "the body is a JSON object")
    return request


def _call(request: dict[str, Any]) -> tuple[str, str, Limits | None]:
    code, stdin, bounds = request.get("code"), request.get("input", ""), request.get("limits")
    if not isinstance(code, str) or not isinstance(stdin, str):
        raise _Refused(400, "code and input are texts")
    if bounds is None:
        return code, stdin, None
    names = {field.name for field in fields(Limits)}
    if not isinstance(bounds, dict) or not set(bounds) <= names:
        raise _Refused(400, f"limits is an object of {', '.join(sorted(names))}")
    if not all(isinstance(value, int | float) and 0 < value <= 1 << 20 for value in bounds.values()):
        raise _Refused(400, "each limit is a positive number")
    whole = {name: int(value) for name, value in bounds.items() if name in ("memory_mib", "output_kib")}
    return code, stdin, Limits(**(bounds | whole))


def _shown(result: Result) -> dict[str, Any]:
    return asdict(result) | {"status": result.status.value, "infra": result.infra, "text": result.to_text()}
