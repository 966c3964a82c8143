"""A node of a cluster: this host joins Ray and offers one role's resource, until its process ends.

Consumes    a role, the head's address, how many of the role this host offers, the kind of device
Produces    a Ray node; with `--dry-run` the environment and command it would have been started with
Waits for   SIGINT, SIGTERM, SIGHUP, or the end of Ray's own process
Invariant   when this process is gone, however it ended, so is every process of the node
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from actors import platform
from actors.settings import RolloutSettings
from launch import cluster, environment, warden
from launch.config import ConfigError

DEFAULT_PORT = 6379
NO_PORT = "65536"
"""No socket has it: Ray's head would serve figures to everybody, and knows no other way to be kept from it."""
MAX_STARTS = 4
START_S = 60.0
"""Ray's own start gives up after 30 s, which a host that starts several nodes at once may need."""
HEAD_PATIENCE_S = 60.0
"""Nodes and head may be started at the same moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """What a node is started with."""

    role: str
    address: str
    """of the head; for the head itself its port alone"""
    count: int
    device: str
    token: Path

    @classmethod
    def of(cls, role: str, *, address: str, count: int, device: str, token: Path | None) -> Node:
        """Checked, with what was left out filled in."""
        if role not in cluster.NODE_RESOURCES:
            raise ConfigError(f"{role!r} is no role: it is one of {', '.join(cluster.NODE_RESOURCES)}")
        if device not in ("auto", "cpu", "cuda", "rocm"):
            raise ConfigError(f"--device {device!r} must be auto, cpu, cuda or rocm")
        if role == "head":
            address = address.rpartition(":")[2] or str(DEFAULT_PORT)
        elif not address:
            raise ConfigError(
                f"--address HOST:PORT is missing: where the head of the cluster listens (bash launch/{role}.sh)"
            )
        if role in ("head", "buffer") and count != 1:
            raise ConfigError(f"--count {count}: a run has one {role}")
        return cls(
            role=role,
            address=address,
            count=count,
            device=environment.detect_device() if device == "auto" else device,
            token=token or cluster.default_token(),
        )

    def environment(self) -> dict[str, str]:
        """Variables that the node's processes get on top of this one's."""
        variables = {**environment.RAY, "RAY_AUTH_TOKEN_PATH": str(self.token)}
        if self.role == "head":
            variables["DASHBOARD_METRIC_PORT"] = NO_PORT
        if self.role in ("rollout", "learner"):
            variables |= platform.environment(self.device, RolloutSettings())
        return variables

    def command(self) -> list[str]:
        """How Ray is started."""
        resources = dict.fromkeys(cluster.NODE_RESOURCES[self.role], self.count)
        where = ["--head", f"--port={self.address}"] if self.role == "head" else [f"--address={self.address}"]
        return [
            str(Path(sys.executable).with_name("ray")),
            "start",
            *where,
            f"--resources={json.dumps(resources)}",
            "--num-cpus=1",
            *([] if self.role in ("rollout", "learner") else ["--num-gpus=0"]),
            f"--object-store-memory={cluster.OBJECT_STORE_BYTES}",
            *(["--include-dashboard=false", "--no-monitor"] if self.role == "head" else []),
            "--disable-usage-stats",
            "--log-color=false",
            "--block",
        ]


def serve(node: Node, *, dry_run: bool) -> int:
    """Runs the node until it is ended; the exit code."""
    environment.refuse_two_masks(os.environ)
    variables = node.environment()
    if dry_run:
        for name, value in variables.items():
            print(f"export {name}={shlex.quote(value)}")
        print(shlex.join(node.command()))
        return 0
    if node.role == "head":
        cluster.make_token(node.token)
    elif not node.token.is_file():
        raise ConfigError(f"the cluster's token {node.token} is not here: copy the head's, or name it with --token")
    else:
        cluster.await_head(node.address, patience_s=HEAD_PATIENCE_S)
    marks = {"ROCSTAR_NODE": uuid.uuid4().hex}
    guard = warden.watch_me(marks)
    code = _run(node, {**os.environ, **variables, **marks}, marks)
    assert guard.stdin is not None
    guard.stdin.close()
    guard.wait()
    return code


def _run(node: Node, variables: dict[str, str], marks: dict[str, str]) -> int:
    """Ray's process until its end or ours; started again when it gave up in the middle of its start."""
    stopped: list[int] = []
    for left in reversed(range(MAX_STARTS)):
        # In a session of its own: the terminal's Ctrl-C reaches this process alone, which then ends Ray in good order.
        process = subprocess.Popen(node.command(), env=variables, start_new_session=True)

        def stop(number: int, frame: object, process: subprocess.Popen[bytes] = process) -> None:
            stopped.append(number)
            process.terminate()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, stop)
        started_s = time.monotonic()
        code = process.wait()
        warden.kill_marked(marks)
        if stopped or code == 0:
            return 0
        if time.monotonic() - started_s > START_S or not left:
            break
        print(f"Ray ended with code {code} while it started; it is started again, {left} times at most", flush=True)
    return 1
