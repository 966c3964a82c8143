"""The Ray cluster: environment, what each role needs of it, starting one here or joining one.

Consumes    a recipe, the address of a cluster or none
Produces    a connected Ray, or `ConfigError`/`TimeoutError` that say which roles' resources are missing
Waits for   nodes that offer the recipe's roles
Unblocked by  `launch/ROLE.sh` on those nodes
Invariant   no trajectory and no weight goes through Ray: its object store is as small as it may be
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from launch.config import ConfigError
from launch.environment import ALONE, RAY, refuse_two_masks
from launch.tree import Recipe

NODE_RESOURCES: dict[str, tuple[str, ...]] = {
    "head": (),
    "buffer": ("buffer", "filter"),
    "sandbox": ("sandbox",),
    "rollout": ("rollout",),
    "learner": ("learner",),
}
"""What a node of each kind offers. The RoC filter holds nothing and sits beside the buffer."""

OBJECT_STORE_BYTES = 80 << 20
"""Ray refuses less than 75 MiB."""
POLL_S = 0.5
HEAD_PATIENCE_S = 5.0


def needed(recipe: Recipe) -> dict[str, int]:
    """How many of each role's resource a run takes."""
    return {
        "buffer": 1,
        "filter": 1,
        "sandbox": recipe.sandbox.nodes,
        "rollout": recipe.rollout.engines,
        "learner": recipe.learner.ranks,
    }


def default_token() -> Path:
    """Where the head keeps the cluster's token, and nodes look for it."""
    return Path.home() / ".rocstar" / "token"


def make_token(path: Path) -> Path:
    """A token file that only its owner reads; one that is there is kept."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return path


def await_head(address: str, *, patience_s: float) -> None:
    """Returns once something listens there. Ray itself would repeat a paragraph for minutes.

    Raises:
        ConfigError: the address is none, or nothing has listened in time.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"--address {address!r} must be HOST:PORT of the cluster's head")
    end_s = time.monotonic() + patience_s
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=POLL_S).close()
            return
        except OSError as error:
            if time.monotonic() > end_s:
                raise ConfigError(
                    f"--address {address}: nothing listens there ({error}); start the head with bash launch/head.sh, "
                    "which prints its address"
                ) from error
            time.sleep(POLL_S)


def accelerators(recipe: Recipe, role: str) -> float:
    """Of one actor of the role, on a cluster that has any."""
    return {"rollout": recipe.rollout.tensor_parallel, "learner": 1}.get(role, 0)


def has_accelerators() -> bool:
    """Some node of the cluster has accelerators, as Ray sees them."""
    import ray

    return ray.cluster_resources().get("GPU", 0) > 0


def connect(recipe: Recipe, *, address: str, namespace: str, token: Path, scratch: Path) -> None:
    """Joins the cluster at `address`, or starts one of this host alone."""
    refuse_two_masks(os.environ)
    environment = dict(RAY)
    options: dict[str, Any] = {}
    if address:
        environment["RAY_AUTH_TOKEN_PATH"] = os.environ.get("RAY_AUTH_TOKEN_PATH", str(default_token()))
        if not Path(environment["RAY_AUTH_TOKEN_PATH"]).is_file():
            raise ConfigError(
                f"the cluster's token {environment['RAY_AUTH_TOKEN_PATH']} is not here: copy the head's, or name it in "
                "RAY_AUTH_TOKEN_PATH"
            )
        await_head(address, patience_s=HEAD_PATIENCE_S)
        options["address"] = address
    else:
        environment |= ALONE
        environment["RAY_AUTH_TOKEN_PATH"] = str(make_token(token))
        resources = {name: float(count) for name, count in needed(recipe).items()}
        options |= {
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "resources": resources,
            "_temp_dir": str(scratch),
        }
    os.environ.update(environment)
    os.environ.pop("RAY_ADDRESS", None)
    import ray

    _quiet_ray()
    try:
        ray.init(namespace=namespace, log_to_driver=False, logging_level="error", configure_logging=False, **options)
    except (ConnectionError, RuntimeError) as error:
        raise ConfigError(f"Ray at {address or 'this host'}: {error}") from error
    except Exception as error:  # Ray's own processes did not come up in time: it has no better class for that
        raise RuntimeError(f"Ray at {address or 'this host'} did not start: {error}") from error


def _quiet_ray() -> None:
    """What becomes of the roles is told by the driver; Ray would tell it again, a paragraph per process."""
    import ray._private.worker as internals

    logging.getLogger("ray").setLevel(logging.ERROR)
    internals.listen_error_messages = lambda worker, threads_stopped: None


def wait_for_roles(recipe: Recipe, say: Callable[[str], None]) -> None:
    """Returns when the cluster has free what the recipe's roles take.

    Raises:
        TimeoutError: run.start_timeout_s are over; the message says what is missing.
        ConfigError: the learner's ranks would be on several hosts.
    """
    end_s, said = time.monotonic() + recipe.run.start_timeout_s, ""
    while missing := _missing(recipe):
        words = ", ".join(f"{count} {role} (bash launch/{role}.sh)" for role, count in missing.items())
        if words != said:
            say(f"waiting for nodes: {words}")
            said = words
        if time.monotonic() > end_s:
            raise TimeoutError(f"after run.start_timeout_s = {recipe.run.start_timeout_s:g} still missing: {words}")
        time.sleep(POLL_S)
    if fault := ranks_apart(recipe.learner.ranks, _offers("learner")):
        raise ConfigError(fault)


def ranks_apart(ranks: int, offers: Mapping[str, int]) -> str:
    """Why the ranks can't be on one host, given how many each host offers; "" when they are."""
    hosts = {host: count for host, count in offers.items() if count}
    if ranks == 1 or len(hosts) <= 1:
        return ""
    there = ", ".join(f"{host}: {count}" for host, count in sorted(hosts.items()))
    return (
        f"learner.ranks = {ranks}, offered by {len(hosts)} hosts ({there}), 1 is allowed: their collectives know no "
        f"keys and stay on loopback; offer all on one host with bash launch/learner.sh --count {ranks} and end the "
        "others, or set learner.ranks to 1"
    )


def _offers(role: str) -> dict[str, int]:
    """How many of the role each host of the cluster offers."""
    import ray

    offers: dict[str, int] = {}
    for node in ray.nodes():
        if node["Alive"]:
            host = node["NodeManagerAddress"]
            offers[host] = offers.get(host, 0) + int(node["Resources"].get(role, 0))
    return offers


def num_hosts() -> int:
    """How many hosts the cluster's nodes are on; on one alone, roles talk over loopback."""
    import ray

    return len({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})


def _missing(recipe: Recipe) -> dict[str, int]:
    import ray

    free = ray.available_resources()
    short = {role: count - int(free.get(role, 0)) for role, count in needed(recipe).items()}
    merged: dict[str, int] = {}
    for role, count in short.items():
        if count > 0:
            owner = next(node for node, offers in NODE_RESOURCES.items() if role in offers)
            merged[owner] = max(merged.get(owner, 0), count)
    return merged
