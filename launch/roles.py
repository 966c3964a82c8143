"""One Ray actor class for every role: a thread that runs the role's body, and a door for the driver and for peers.

Consumes    `RoleSpec`
Produces    a running body (launch/bodies.py); its state, its endpoint, a log file
Waits for   nothing: each method answers at once, except `endpoint`, which waits for the body to listen
Unblocked by  the body listening, or failing
Invariant   a body that fails ends its process, so that Ray restarts the role; a life shorter than SHORTEST_LIFE_S is
            stretched to it, which bounds how often that happens; what an earlier life left behind is ended first
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from buffer.doors import Keys
from launch import warden
from launch.config import validate
from launch.environment import detect_device, device_environment
from launch.tree import Recipe

SHORTEST_LIFE_S = 3.0
ENDPOINT_WAIT_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RoleSpec:
    """What a role process is told, e.g. RoleSpec(role="rollout", index=1, ...) is the actor rollout-1."""

    role: str
    index: int
    run: str
    """wire id of the run: the same after a resume"""
    life: str
    """of the driver: new at every start; names the Ray namespace and marks the processes"""
    directory: str
    """of the run, absolute"""
    recipe: dict[str, Any]
    """the resolved tree"""
    keys: dict[str, str] | None = field(default=None, repr=False)
    """of the run's wires where it spans several hosts; None: every role is on this host and listens on loopback"""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}"

    @property
    def namespace(self) -> str:
        return f"rocstar-{self.life}"

    @property
    def marks(self) -> dict[str, str]:
        """Environment variables by which the warden knows the role's processes."""
        return {"ROCSTAR_RUN": self.life, "ROCSTAR_ROLE": self.name}

    @property
    def wire_keys(self) -> Keys | None:
        """What the role's sockets are given."""
        return Keys(**self.keys) if self.keys else None

    def settings(self) -> Recipe:
        """The checked tree."""
        return validate(Recipe, self.recipe, self.name)


class Role:
    """The actor. All calls come from Ray's threads; the body has its own."""

    def __init__(self, spec: dict[str, Any]) -> None:
        import ray

        self._node: str = ray.get_runtime_context().get_node_id()
        self._spec = RoleSpec(**spec)
        self._born_s = time.monotonic()
        self._state, self._error, self._endpoint = "starting", "", ""
        self.rendezvous = ""
        self._listening = threading.Event()
        self._stop = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        warden.kill_marked(self._spec.marks)
        os.environ.update(device_environment(self._spec.settings(), self._spec.role, detect_device()))
        os.makedirs(os.environ["TMPDIR"], exist_ok=True)  # on hosts other than the driver's it is not there yet
        _log_to(Path(self._spec.directory) / "logs" / f"{self._spec.name}.log")
        threading.Thread(target=self._live, name=self._spec.name, daemon=True).start()

    def poll(self) -> dict[str, Any]:
        """State (starting, waiting, running, ended, failed), error, process id, Ray's id of the node, endpoint."""
        return {
            "state": self._state,
            "error": self._error,
            "pid": os.getpid(),
            "node": self._node,
            "endpoint": self._endpoint,
        }

    def endpoint(self) -> str:
        """Where the role listens; "" when it does not yet, so that the asker asks again."""
        self._listening.wait(ENDPOINT_WAIT_S)
        return self._endpoint

    def meeting(self) -> str:
        """Where the ranks of this life of the learner meet; "" when that is not known yet."""
        return self.rendezvous

    def figures(self) -> dict[str, Any]:
        """What the index says; asked of the buffer's role, whose host has the index."""
        from launch.figures import figures

        return figures(Path(self._spec.directory))

    def stop(self) -> None:
        """Ends the body in good order, as far as it knows how; `poll` tells when."""
        self._stop.set()
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # the loop has closed: the body is at its end already
                self._loop.call_soon_threadsafe(self._task.cancel)

    def listening(self, endpoint: str) -> None:
        """Said by the body once it accepts connections."""
        self._endpoint = endpoint
        self._listening.set()

    def stage(self, name: str) -> None:
        """Said by the body: "running" once it has started, or "waiting" for another role before it can."""
        self._state = name

    def _live(self) -> None:
        try:
            # Not uvloop, which Ray makes the default: its transports are not asyncio's own classes.
            with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
                runner.run(self._body())
        except BaseException as error:  # the one boundary: whatever a body raises ends this life
            with contextlib.suppress(OSError):  # the log's disk may be full, which must not hide the failure
                traceback.print_exc()
            self._fail(error)
        self._state = "ended"
        with contextlib.suppress(OSError):
            print(f"{self._spec.name}: ended", flush=True)

    async def _body(self) -> None:
        from launch.bodies import BODIES

        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        print(f"{self._spec.name}: process {os.getpid()} starts", flush=True)
        try:
            await BODIES[self._spec.role](self._spec, self)
        except asyncio.CancelledError:
            if not self._stop.is_set():
                raise

    def _fail(self, error: BaseException) -> None:
        """Leaves the driver time to read the error, then ends the process: Ray starts another."""
        self._error = f"{type(error).__name__}: {error}"
        self._state = "failed"
        self._listening.set()
        time.sleep(max(1.0, SHORTEST_LIFE_S - (time.monotonic() - self._born_s)))
        warden.kill_marked(self._spec.marks)
        os._exit(1)


def _log_to(path: Path) -> None:
    """This process's output, that of its libraries and children included, goes to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    faulthandler.enable(file=sys.__stderr__ or sys.stderr)


def start(spec: RoleSpec, *, environment: dict[str, str], max_restarts: int, num_gpus: float) -> Any:
    """Creates the role's actor, bound to the role's resource; the handle."""
    import ray

    return (
        ray.remote(Role)
        .options(
            name=spec.name,
            namespace=spec.namespace,
            num_cpus=0,
            num_gpus=num_gpus,
            resources={spec.role: 1},
            max_restarts=max_restarts,
            max_concurrency=8,
            runtime_env={"env_vars": {**environment, **spec.marks}},
        )
        .remote(asdict(spec))
    )
