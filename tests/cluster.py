"""A cluster by hand: `python -m tests.cluster --json`. Needs root, two cores and about three minutes.

Consumes    the role scripts, the quickstart's recipe made small
Produces    five hosts (network namespaces) that the scripts join to one Ray cluster, each role on its own; a run on
            them; meanwhile the rollout node is killed and started again, and the sandbox stopped. Figures, and whether
            all was as it must be
Waits for   each phase at most PATIENCE_S
Invariant   no process, namespace or file of the cluster is left, however it ended
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from launch import warden
from launch.cluster import make_token
from tests import audit
from tests.hosts import NEEDS_ROOT, Network, is_root
from tests.whole_run import SMALL

ROOT = Path(__file__).parents[1]
ROLES = ("buffer", "sandbox", "rollout", "learner")
PATIENCE_S = 600.0
SHORT = (*SMALL, "evaluation.at_start=false", "evaluation.at_end=false")
ALONE = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
"""Each host sees files of Ray's of its own: nodes that share them take each other's sockets."""
GREETING_BYTES = 64
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
"""What a ZeroMQ peer says first; the other end's greeting goes on to name the mechanism that it asks for."""
TOKENS = {"with the token": "", "with another token": "0" * 64, "without a token": None}


@dataclass(kw_only=True, slots=True)
class Report:
    """What was seen."""

    hosts: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    first_batch_s: float = 0.0
    """from the first script's start to the first batch on record"""
    recovered_s: float = 0.0
    """from the rollout script's second start to the first turn that the new engine made durable"""
    stopped_s: float = 0.0
    """from a SIGSTOP of the sandbox on its host to its process's end, the driver's doing from another host"""
    steps_before: int = 0
    """batches taken when the rollout node was gone"""
    ray_heard: dict[str, bool] = field(default_factory=dict)
    """whether Ray's head answers a client with the cluster's token, with another one, with none"""
    wall_s: float = 0.0
    exit_code: int = -1
    learner_steps: int = 0
    doors: dict[str, list[str]] = field(default_factory=dict)
    """per host: what listens beyond loopback, by process and what it asks of strangers"""
    problems: list[str] = field(default_factory=list)


class Cluster:
    """The scripts on their hosts, and the driver on the head's."""

    def __init__(self, network: Network, scratch: Path) -> None:
        self._network, self._scratch = network, scratch
        self.directory = scratch / "run"
        self.marks = {"ROCSTAR_TEST": uuid.uuid4().hex}
        self._token = make_token(scratch / "token")  # as somebody would copy it to every host
        self._head = f"{network['head'].address}:6379"

    def node(self, role: str) -> subprocess.Popen[bytes]:
        """Starts a role's script on its host."""
        where = ("--address", "6379" if role == "head" else self._head, "--token", str(self._token))
        script = str(ROOT / "launch" / f"{role}.sh")
        return self._start(role, "bash", script, *where, "--device", "cpu")

    def run(self, steps: int) -> subprocess.Popen[bytes]:
        """Starts the driver."""
        overrides = (*SHORT, f"run.steps={steps}", f"run.directory={self.directory}")
        sets = [part for override in overrides for part in ("--set", override)]
        recipe = str(ROOT / "launch" / "recipes" / "quickstart.toml")
        return self._start("head", sys.executable, "-m", "launch", "run", recipe, "--address", self._head, *sets)

    def _start(self, host: str, *arguments: str, **variables: str) -> subprocess.Popen[bytes]:
        own = {"OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(self._scratch)}
        own |= variables or {"RAY_AUTH_TOKEN_PATH": str(self._token)}
        own_files = self._scratch / "hosts" / host, self._scratch / "ray"
        for folder in own_files:
            folder.mkdir(parents=True, exist_ok=True)
        with open(self._scratch / f"{host}.out", "ab") as log:
            return subprocess.Popen(
                self._network[host].command(
                    "unshare", "--mount", "bash", "-c", ALONE, "bash", *map(str, own_files), *arguments
                ),
                cwd=ROOT,
                env=os.environ | self.marks | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def ray_answers(self, token: str | None) -> bool:
        """Whether the head tells a stranger's host, which has this token, what keys it stores."""
        ask = f"from ray._raylet import GcsClient; GcsClient(address={self._head!r}).internal_kv_keys(b'', None, 5)"
        own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token or self._token.read_text()}
        own = {"RAY_AUTH_MODE": "disabled"} if token is None else own
        return not self._start("stranger", sys.executable, "-c", ask, **own).wait(PATIENCE_S)

    def count(self, table: str) -> int:
        """Rows of the buffer's index."""
        index = self.directory / "buffer" / "index.sqlite"
        if not index.exists():
            return 0
        with closing(sqlite3.connect(f"file:{index}?mode=ro", uri=True)) as db:
            try:
                return int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
            except sqlite3.OperationalError:  # the table is not there yet
                return 0

    def told(self) -> str:
        """Ends of all logs."""
        logs = [*sorted(self._scratch.glob("*.out")), *sorted((self.directory / "logs").glob("*.log"))]
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in logs)


def until(what: str, seen: Callable[[], bool], *running: subprocess.Popen[bytes]) -> None:
    """Returns once it is seen; none of `running` may end before."""
    end_s = time.monotonic() + PATIENCE_S
    while not seen():
        ended = [process.args for process in running if process.poll() is not None]
        if ended or time.monotonic() > end_s:
            raise TimeoutError(f"no {what} within {PATIENCE_S:g} s" if not ended else f"{ended} ended before {what}")
        time.sleep(0.2)


def listening(network: Network, host: str) -> dict[int, str]:
    """Ports of the host that other hosts reach, with the process that listens."""
    shown = subprocess.run(network[host].command("ss", "-Hltnp"), capture_output=True, text=True, check=True).stdout
    found = {}
    for line in shown.splitlines():
        where, _, port = line.split()[3].rpartition(":")
        if not where.strip("[]").startswith("127."):
            found[int(port)] = line.partition('(("')[2].partition('"')[0]
    return found


def doors(network: Network) -> dict[str, list[str]]:
    """Per host what strangers find, e.g. {"buffer": ["ray::Role zmq CURVE", ...]}."""
    with ThreadPoolExecutor(32) as pool:
        answers = {
            host: [(owner, pool.submit(_asks, network, host, port)) for port, owner in listening(network, host).items()]
            for host in ("head", *ROLES)
        }
        return {host: sorted({f"{owner} {said.result()}" for owner, said in some}) for host, some in answers.items()}


def _asks(network: Network, host: str, port: int) -> str:
    """What a stranger without keys hears: a ZeroMQ mechanism, a status of HTTP, or neither."""
    with network["stranger"].entered():
        heard = _hear(network[host].address, port, GREETING)
        if heard[:1] + heard[9:11] == b"\xff\x7f\x03":
            return f"zmq {heard[12:32].rstrip(bytes(1)).decode()}"
        heard = _hear(network[host].address, port, b"GET /metrics HTTP/1.0\r\n\r\n")
        return f"http {heard[9:12].decode()}" if heard.startswith(b"HTTP/1") else "other"


def _hear(address: str, port: int, say: bytes) -> bytes:
    heard = b""
    with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1.0) as peer:
        peer.sendall(say)
        while len(heard) < GREETING_BYTES and (some := peer.recv(GREETING_BYTES)):
            heard += some
    return heard


def stop(marks: dict[str, str], driver: subprocess.Popen[bytes]) -> float:
    """Stops a role; seconds until somebody has ended it."""
    family = set(warden.marked(marks))
    (pid,) = (pid for pid in family if psutil.Process(pid).ppid() not in family)
    begun_s = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    until("end of the stopped role", lambda: pid not in warden.marked(marks), driver)
    return time.monotonic() - begun_s


def exercise(cluster: Cluster, network: Network, steps: int, report: Report) -> None:
    """The phases, one after the other."""
    started_s = time.monotonic()
    nodes = {role: cluster.node(role) for role in ("head", *ROLES)}
    driver = cluster.run(steps)
    until("batch", lambda: cluster.count("batches") > 0, driver, *nodes.values())
    report.first_batch_s = round(time.monotonic() - started_s, 1)
    nodes["rollout"].kill()
    nodes["rollout"].wait()
    until("end of the rollout node", lambda: not listening(network, "rollout"), driver)
    report.steps_before = cluster.count("batches")
    known, again_s = cluster.count("turns"), time.monotonic()
    nodes["rollout"] = cluster.node("rollout")
    report.ray_heard = {what: cluster.ray_answers(token) for what, token in TOKENS.items()}
    until("turn of the new engine", lambda: cluster.count("turns") > known, driver)
    report.recovered_s = round(time.monotonic() - again_s, 1)
    report.doors = doors(network)
    report.stopped_s = round(stop(cluster.marks | {"ROCSTAR_ROLE": "sandbox-0"}, driver), 1)
    report.exit_code = driver.wait(PATIENCE_S)
    for node in nodes.values():
        node.terminate()
    for node in nodes.values():
        node.wait(PATIENCE_S)
    report.wall_s = round(time.monotonic() - started_s, 1)


def judge(cluster: Cluster, report: Report) -> None:
    """What must hold."""
    summary: dict[str, Any] = json.loads((cluster.directory / "summary.json").read_text())
    report.learner_steps = summary["learner_steps"]
    if report.exit_code or not report.steps_before < report.learner_steps <= report.steps:
        report.problems.append(
            f"exit code {report.exit_code} after {report.steps_before}, then {report.learner_steps} steps"
        )
    found = audit.report.audit(cluster.directory)
    if not found.sound:
        report.problems.extend(found.lines())
    for role in ("buffer", "sandbox", "learner"):
        if "ray::Role zmq CURVE" not in report.doors[role]:
            report.problems.append(f"{role} listens for nobody: {report.doors[role]}")
    for host, found_open in report.doors.items():
        report.problems.extend(
            f"{host}: open to strangers: {door}" for door in found_open if door.endswith(("zmq NULL", "http 200"))
        )
    if list(report.ray_heard.values()) != [True, False, False]:
        report.problems.append(f"Ray's head answers {report.ray_heard}")
    if left := warden.marked(cluster.marks):
        report.problems.append(f"{len(left)} processes are left")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description="a run on five hosts")
    parser.add_argument("--steps", type=int, default=30, help="of the run (default: 30)")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options = parser.parse_args()
    if not is_root():
        print(NEEDS_ROOT, file=sys.stderr)
        return 2
    report = Report(steps=options.steps)
    scratch = Path(tempfile.mkdtemp(prefix="rsc-"))
    with Network("head", *ROLES, "stranger") as network:
        report.hosts = {host: network[host].address for host in ("head", *ROLES)}
        cluster = Cluster(network, scratch)
        try:
            exercise(cluster, network, options.steps, report)
            judge(cluster, report)
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            report.problems.append(f"{error}\n{cluster.told()}")
        finally:
            warden.kill_marked(cluster.marks)
            shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps(asdict(report), indent=1) if options.json else report)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
