"""How roles find each other: by name, through Ray's authenticated control plane.

Consumes    the Ray namespace of a run
Produces    async callables that answer with the endpoint a role has now
Waits for   the named role to listen, for ever: who asks has a deadline of its own;
            one question to a role for ASK_TIMEOUT_S
Unblocked by  the role's body listening; a restarted role is found again by its name
Invariant   no address is written anywhere
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from buffer.client import BufferClient
from buffer.doors import Keys
from launch.threads import in_thread

RETRY_S = 0.3
ASK_TIMEOUT_S = 5.0
"""A stopped process answers never; its peers must not wait with it."""


class Links:
    """Endpoints of one run's roles.

    Example:
        resolve = Links("rocstar-1a2b").to("buffer-0")
        await resolve()         # "tcp://127.0.0.1:40123"
    """

    def __init__(self, namespace: str, keys: Keys | None = None) -> None:
        self._namespace, self.keys = namespace, keys

    def to(self, name: str) -> Callable[[], Awaitable[str]]:
        """Resolves one role."""
        return lambda: self._find(name)

    def to_all(self, role: str, count: int) -> Callable[[], Awaitable[list[str]]]:
        """Resolves those of a role that listen now, in their order; waits only while none does."""
        names = [f"{role}-{index}" for index in range(count)]

        async def resolve() -> list[str]:
            while True:
                answers = await asyncio.gather(*(self._ask(name, "endpoint") for name in names))
                if any(answers):
                    return [answer for answer in answers if answer]
                await asyncio.sleep(RETRY_S)

        return resolve

    async def rendezvous(self, name: str) -> str:
        """Where the ranks that belong to the present life of `name` meet."""
        return await self._find(name, "meeting")

    async def _find(self, name: str, method: str = "endpoint") -> str:
        while True:
            answer = await self._ask(name, method)
            if answer:
                return answer
            await asyncio.sleep(RETRY_S)

    async def _ask(self, name: str, method: str) -> str:
        """The role's answer; "" while it has none, is restarting, or does not answer."""
        import ray

        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                handle: Any = await in_thread(lambda: ray.get_actor(name, self._namespace))
                return str(await asyncio.wrap_future(getattr(handle, method).remote().future()))
        except (TimeoutError, ValueError, ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError):
            return ""

    def buffer_client(self, run: str, *, role: str, name: str, timeout_s: float = 120.0) -> BufferClient:
        """A client of the run's buffer."""
        resolve = self.to("buffer-0")
        return BufferClient(resolve, run=run, role=role, name=name, request_timeout_s=timeout_s, keys=self.keys)
