"""Client of one or several sandbox nodes.

Consumes    programs and answers
Produces    one Result or Verdict each, whatever happens to nodes
Waits for   a node's result, at most the request's deadline; the nodes' addresses, RESOLVE_TIMEOUT_S at a time
Unblocked by the deadline (WORKER_LOST), by close() (CANCELLED)
Invariant   in flight per node never exceeds the window it gave; a silent node's requests go to another one; only
            infrastructure outcomes are tried again, a bounded number of times
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import zmq

from buffer.doors import Keys
from sandbox import wire
from sandbox.answers import quick_verdict
from sandbox.api import Call, Limits, Result, Status, Verdict
from sandbox.node import Node
from sandbox.request import CheckFailed, Request
from sandbox.session import Session

__all__ = ["CheckFailed", "Endpoints", "SandboxClient"]

Endpoints = Sequence[str] | Callable[[], Sequence[str] | Awaitable[Sequence[str]]]

_TICK_S = 1.0
_MAX_TRIES = 3
_RESOLVE_EVERY = 5
RESOLVE_TIMEOUT_S = 10.0


class SandboxClient:
    """Runs programs and grades answers on the least busy node.

    Example:
        client = SandboxClient(["tcp://127.0.0.1:7071"])
        result = await client.run("print(6 * 7)")
        await client.close()
    """

    def __init__(
        self,
        endpoints: Endpoints,
        *,
        tenant: str = "default",
        timeout_s: float = 120.0,
        keys: Keys | None = None,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        """Nothing is connected before the first request. `endpoints`: the nodes, or a function (plain or async) that
        names the present ones; `tenant`: name of the run, nodes are fair between them; `timeout_s`: after which a
        request is given up; `keys`: of the run, where nodes listen beyond loopback.
        """
        self._endpoints = endpoints
        self._tenant, self._timeout_s, self._keys = tenant, timeout_s, keys
        self._context = context or zmq.Context.instance()
        self._nodes: dict[str, Node] = {}
        self._waiting: deque[Request] = deque()
        self._requests: dict[str, Request] = {}
        self._prefix, self._sequence = uuid.uuid4().hex[:12], itertools.count()
        self._tasks: list[asyncio.Task[None]] = []
        self._unresolved, self._pumping = "", False

    async def run(
        self,
        code: str,
        input: str = "",
        *,
        limits: Limits | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Result:
        """Run a program; the result carries its own status, nothing is raised.

        Args:
            code: Python source.
            input: text on its standard input.
            limits: other than the node's.
            priority: higher goes first among this tenant's (the learner step that waits for it, negated).
            timeout_s: seconds until it is given up, waiting for nodes included.
        """
        call = Call(id=self.new_id(), code=code, input=input, limits=limits)
        return (await self.run_call(call, priority=priority, timeout_s=timeout_s))[0]

    async def run_call(
        self, call: Call, *, priority: int = 0, timeout_s: float | None = None, home: Node | None = None
    ) -> tuple[Result, Node | None]:
        """Run a call, at `home` only if that is given; the result and the node that gave it."""
        texts = isinstance(call.code, str) and isinstance(call.input, str)
        why = wire.unfit(call) if texts else "code and input are texts"
        if why:
            return Result(id=call.id, status=Status.BAD_REQUEST, exception=f"bad request: {why}"), home
        request = self._request(call.id, wire.RUN, wire.call_fields(call, priority), home)
        outcome = await self._ask(request, timeout_s)
        assert isinstance(outcome, Result)
        return outcome, request.served

    def session(self) -> Session:
        """A session: variables survive from one `run` to the next."""
        return Session(self)

    async def check(self, answer: str, gold: str, *, timeout_s: float | None = None) -> Verdict:
        """Grade an answer; plain numbers are compared here, without a node.

        Raises:
            CheckFailed: no node could do it in time.
        """
        quick = quick_verdict(answer, gold)
        if quick is not None:
            return quick
        name = self.new_id()
        fields = [name, *(text.encode("utf-8", "replace").decode() for text in (answer, gold))]
        outcome = await self._ask(self._request(name, wire.CHECK, fields, None), timeout_s)
        if isinstance(outcome, Result):
            raise CheckFailed(f"answer not graded: {outcome.status.value} {outcome.exception}")
        return outcome

    async def close(self) -> None:
        """Give up what is in flight (as CANCELLED) and disconnect."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        for request in list(self._requests.values()):
            self._settle(request, Result(id=request.id, status=Status.CANCELLED, exception="the client closed"))
        for node in self._nodes.values():
            node.close()
        self._nodes.clear()

    def new_id(self) -> str:
        """An id that nobody else uses."""
        return f"{self._prefix}-{next(self._sequence)}"

    def _request(self, name: str, kind: str, fields: list[Any], home: Node | None) -> Request:
        return Request(name, kind, fields, asyncio.get_running_loop().create_future(), home=home)

    async def _ask(self, request: Request, timeout_s: float | None) -> Result | Verdict:
        loop = asyncio.get_running_loop()
        if not self._tasks:
            self._tasks = [loop.create_task(work) for work in (self._look(), self._tick())]
        self._requests[request.id] = request
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        request.timers.append(loop.call_later(limit_s, self._expire, request, limit_s))
        self._enqueue(request)
        try:
            return await request.future
        finally:
            if request.id in self._requests:  # our caller was cancelled
                self._drop(request, cancel=True)

    def _enqueue(self, request: Request) -> None:
        if request.id in self._requests:
            self._waiting.append(request)
            self._pump_soon()

    def _pump_soon(self) -> None:
        """Place what gathered in this turn of the loop in one message per node."""
        if not self._pumping:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        while self._waiting:
            request = self._waiting[0]
            if request.id not in self._requests:
                self._waiting.popleft()
                continue
            if request.home is not None:
                self._waiting.popleft()
                self._send_home(request, request.home)
                continue
            open_nodes = [node for node in self._nodes.values() if node.has_room()]
            if not open_nodes:
                break
            self._waiting.popleft()
            node = min(open_nodes, key=lambda node: (node is request.avoid, node.load()))
            request.node = node
            node.submit(request.id, request.kind, request.fields)
        for node in self._nodes.values():
            node.flush()

    def _send_home(self, request: Request, home: Node) -> None:
        """A session's cell goes to the session's node, or nowhere."""
        if home.alive:
            request.node = home
            home.submit(request.id, request.kind, request.fields)
        else:
            self._settle(request, Result(id=request.id, status=Status.SESSION_LOST))

    def _expire(self, request: Request, limit_s: float) -> None:
        named = ", ".join(node.describe() for node in self._nodes.values()) or "no node is known"
        cause = f"no answer within {limit_s:g} s ({named}{self._unresolved})"
        self._drop(request, cancel=True)
        self._resolve(request, Result(id=request.id, status=Status.WORKER_LOST, exception=cause))

    def _drop(self, request: Request, *, cancel: bool) -> None:
        """Forget a request; `cancel`: tell its node."""
        self._requests.pop(request.id, None)
        for timer in request.timers:
            timer.cancel()
        if request.node is not None:
            request.node.forget(request.id, cancel=cancel)
            request.node = None
            self._pump_soon()

    @staticmethod
    def _resolve(request: Request, outcome: Result | Verdict) -> None:
        if not request.future.done():
            request.future.set_result(outcome)

    def _settle(self, request: Request, outcome: Result | Verdict) -> None:
        self._drop(request, cancel=False)
        self._resolve(request, outcome)

    def _on_outcome(self, node: Node, name: str, outcome: Result | Verdict) -> None:
        """A node answered; an answer to something that went elsewhere meanwhile is as good."""
        request = self._requests.get(name)
        if request is None:
            node.forget(name, cancel=False)
            return
        retried = (Status.OVERLOADED, Status.INTERNAL)  # a node reports WORKER_LOST after its own second try
        if not isinstance(outcome, Result) or outcome.status not in retried:
            request.served = node
            self._settle(request, outcome)
            return
        if request.node is not node:
            return
        node.forget(name, cancel=False)
        request.node, request.avoid = None, node
        if outcome.status is Status.OVERLOADED:  # the deadline bounds how often
            loop = asyncio.get_running_loop()
            request.timers.append(loop.call_later(outcome.retry_after_s, self._enqueue, request))
            return
        request.tries += 1
        if request.tries >= _MAX_TRIES:
            self._settle(request, replace(outcome, id=name))
        else:
            self._enqueue(request)

    def _on_silent(self, node: Node) -> None:
        """A node is gone: what it had goes to another (or to it again, when it is the only one and comes back)."""
        for name in node.take_all():
            request = self._requests.get(name)
            if request is not None and request.node is node:
                request.node, request.avoid = None, node
                self._enqueue(request)

    async def _tick(self) -> None:
        while True:
            for node in list(self._nodes.values()):
                node.tick()
            self._pump_soon()
            await asyncio.sleep(_TICK_S)

    async def _look(self) -> None:  # not in _tick, which finds silent nodes meanwhile
        for turn in itertools.count():
            if turn % _RESOLVE_EVERY == 0 or not any(node.alive for node in self._nodes.values()):
                await self._resolve_nodes()
            await asyncio.sleep(_TICK_S)

    async def _resolve_nodes(self) -> None:
        """While they can't be told the known ones stay; `endpoints` is foreign code and may fail in any way."""
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                named = self._endpoints() if callable(self._endpoints) else self._endpoints
                wanted = list(dict.fromkeys(await named if inspect.isawaitable(named) else named))
        except Exception as error:
            why = f"within {RESOLVE_TIMEOUT_S:g} s" if isinstance(error, TimeoutError) else f"({error!r})"
            self._unresolved = f"; their addresses were not told {why}"
        else:
            self._unresolved = ""
            self._refresh(wanted)

    def _refresh(self, wanted: list[str]) -> None:
        """Connect to nodes that are new, let go of those that are no more."""
        for endpoint in [endpoint for endpoint in self._nodes if endpoint not in wanted]:
            node = self._nodes.pop(endpoint)
            self._on_silent(node)
            node.close()
        for endpoint in wanted:
            if endpoint not in self._nodes:
                self._nodes[endpoint] = Node(
                    self._context,
                    endpoint,
                    self._tenant,
                    self._keys,
                    on_outcome=self._on_outcome,
                    on_open=self._pump_soon,
                    on_silent=self._on_silent,
                )
