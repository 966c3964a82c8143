"""A session as its user holds it: programs that see what earlier ones left.

Consumes    cells
Produces    a Result each; after SESSION_LOST the next cell begins a new session
Waits for   the node where the session lives
Invariant   nothing is replayed; a cell that was stopped left no trace in the session
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

from sandbox.api import Call, Limits, Result, Status

if TYPE_CHECKING:
    from sandbox.client import SandboxClient
    from sandbox.node import Node


class Session:
    """One session; one cell at a time.

    Example:
        session = client.session()
        await session.run("x = 6")
        result = await session.run("x * 7")  # result.stdout == "42\\n"
        session.close()
    """

    def __init__(self, client: SandboxClient) -> None:
        """Nothing lives yet: the first cell begins it."""
        self._client = client
        self._home: Node | None = None
        self._name = uuid.uuid4().hex

    async def run(
        self,
        code: str,
        input: str = "",
        *,
        limits: Limits | None = None,
        priority: int = 0,
        timeout_s: float | None = None,
    ) -> Result:
        """Run a cell; as SandboxClient.run, in the session's process."""
        call = Call(
            id=self._client.new_id(),
            code=code,
            input=input,
            limits=limits,
            session=self._name,
            first=self._home is None,
        )
        result, node = await self._client.run_call(call, priority=priority, timeout_s=timeout_s, home=self._home)
        if result.status is Status.SESSION_LOST:
            self.close()
        elif self._home is None:
            self._home = node
        return result

    def close(self) -> None:
        """End the process; a cell after this begins anew."""
        if self._home is not None and self._home.alive:
            self._home.end_session(self._name)
        self._home = None
        self._name = uuid.uuid4().hex
