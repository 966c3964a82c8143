"""How roles find each other: by name, through Ray's authenticated control plane.

Consumes    the Ray namespace of a run
Produces    async callables that answer with the endpoint a role has now
Waits for   the named role to listen, for ever: who asks has a deadline of its own
Unblocked by  the role's body listening; a restarted role is found again by its name
Invariant   no address is written anywhere
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

RETRY_S = 0.3


class Links:
    """Endpoints of one run's roles.

    Example:
        resolve = Links("rocstar-1a2b").to("buffer-0")
        await resolve()         # "tcp://127.0.0.1:40123"
    """

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def to(self, name: str) -> Callable[[], Awaitable[str]]:
        """Resolves one role."""
        return lambda: self._find(name)

    def to_all(self, role: str, count: int) -> Callable[[], Awaitable[list[str]]]:
        """Resolves all of a role, in their order."""

        async def resolve() -> list[str]:
            return list(await asyncio.gather(*(self._find(f"{role}-{index}") for index in range(count))))

        return resolve

    async def _find(self, name: str) -> str:
        while True:
            endpoint = await self._ask(name)
            if endpoint:
                return endpoint
            await asyncio.sleep(RETRY_S)

    async def _ask(self, name: str) -> str:
        """Where the role listens; "" while it does not, or is restarting."""
        import ray

        try:
            handle: Any = await asyncio.to_thread(ray.get_actor, name, self._namespace)
            return await asyncio.wrap_future(handle.endpoint.remote().future())
        except (ValueError, ray.exceptions.RayActorError, ray.exceptions.ActorUnavailableError):
            return ""

    def buffer_client(self, run: str, *, role: str, name: str) -> Any:
        """A client of the run's buffer."""
        from buffer.client import BufferClient

        return BufferClient(self.to("buffer-0"), run=run, role=role, name=name)
