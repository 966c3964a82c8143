"""The roles of one run as Ray actors: started, asked, ended.

Consumes    a checked recipe, an opened run directory, a connected Ray
Produces    one named actor per role; their answers to `poll`
Waits for   an answer at most POLL_TIMEOUT_S, Ray's killing at most KILL_S
Invariant   a role that does not answer is None in `poll`, whatever the reason; one that Ray has given up is GONE
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from buffer.doors import Keys
from launch import cluster, warden
from launch.environment import role_environment
from launch.roles import RoleSpec, start
from launch.run_directory import RunDirectory
from launch.supervisor import GONE
from launch.threads import in_thread
from launch.tree import Recipe

POLL_TIMEOUT_S = 2.0
FIGURES_TIMEOUT_S = 60.0
KILL_S = 5.0
LISTENING = ("buffer", "sandbox", "learner")
"""Roles that others connect to."""


class Crew:
    """All actors of a run; empty before `start`."""

    def __init__(self, recipe: Recipe, directory: RunDirectory, life: str) -> None:
        self._recipe, self._directory, self._life = recipe, directory, life
        self._handles: dict[str, Any] = {}
        self._nodes: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        return list(self._handles)

    def of(self, roles: Iterable[str]) -> list[str]:
        """Names of the actors of these roles."""
        wanted = set(roles)
        return [name for name in self._handles if name.rpartition("-")[0] in wanted]

    def start(self, scratch: Path, keys: Keys | None) -> None:
        """Creates every actor; each finds its peers by name as they come up."""
        gpus = cluster.has_accelerators()
        for role, count in cluster.needed(self._recipe).items():
            for index in range(count):
                spec = RoleSpec(
                    role=role,
                    index=index,
                    run=self._directory.run,
                    life=self._life,
                    directory=str(self._directory.path),
                    recipe=self._recipe.model_dump(mode="json"),
                    keys=None if keys is None else asdict(keys if role in LISTENING else keys.for_clients()),
                )
                self._handles[spec.name] = start(
                    spec,
                    environment=role_environment(role, scratch),
                    max_restarts=self._recipe.run.max_restarts,
                    num_gpus=cluster.accelerators(self._recipe, role) if gpus else 0,
                )

    async def poll(self) -> dict[str, dict[str, Any] | None]:
        """Every actor's answer."""
        answers = await asyncio.gather(*map(self._poll, self._handles.values()))
        polls = dict(zip(self._handles, answers, strict=True))
        self._nodes |= {name: poll["node"] for name, poll in polls.items() if poll is not None and "node" in poll}
        return polls

    async def _poll(self, handle: Any) -> dict[str, Any] | None:
        import ray

        try:
            return await asyncio.wait_for(asyncio.wrap_future(handle.poll.remote().future()), POLL_TIMEOUT_S)
        except ray.exceptions.ActorDiedError:
            return {"state": GONE}
        except (TimeoutError, ray.exceptions.RayActorError):
            return None

    async def kill(self, name: str, pid: int) -> None:
        """Ray asks a process to end itself, which a stopped one never does: the kernel of its host ends it.

        One that is gone already does no harm: Ray is starting another, which is not killed in its place.
        """
        import ray

        node, marks = self._nodes.get(name), {"ROCSTAR_RUN": self._life, "ROCSTAR_ROLE": name}
        if node == ray.get_runtime_context().get_node_id():
            warden.kill_one(marks, pid)
            return
        kill = partial(ray.kill, self._handles[name], no_restart=False)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(in_thread(kill if node is None else partial(_kill_there, node, marks, pid)), KILL_S)

    def stop(self, names: Iterable[str]) -> None:
        """Asks bodies to end in good order."""
        for name in names:
            self._handles[name].stop.remote()

    async def ended(self, names: Iterable[str], patience_s: float) -> bool:
        """Whether these bodies came to their end in time."""
        handles = [self._handles[name] for name in names]
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s:
            polls = await asyncio.gather(*map(self._poll, handles))
            if all(poll is None or poll["state"] in ("ended", "failed", GONE) for poll in polls):
                return True
            await asyncio.sleep(0.1)
        return False

    async def well(self, name: str) -> bool:
        """Whether the body came to its end by itself."""
        poll = await self._poll(self._handles[name])
        return poll is not None and poll["state"] == "ended"

    async def figures(self, patience_s: float) -> dict[str, Any]:
        """What the buffer's index says."""
        call = self._handles["buffer-0"].figures.remote()
        return dict(await asyncio.wait_for(asyncio.wrap_future(call.future()), patience_s))

    async def dismiss(self) -> None:
        """Ends every actor for good."""
        import ray

        killing = [in_thread(partial(ray.kill, handle)) for handle in self._handles.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*killing, return_exceptions=True), KILL_S)


def _kill_there(node: str, marks: dict[str, str], pid: int) -> None:
    """Has Ray start a process on another node that ends this one; nobody waits for it."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=there)(warden.kill_one).remote(marks, pid)
