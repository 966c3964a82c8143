"""Several hosts on one: network namespaces, each with an address of its own, joined by a bridge.

Consumes    names of hosts; root's rights
Produces    namespaces that processes and this thread can enter
Waits for   `ip`, which answers at once
Invariant   nothing is made outside of namespaces, and leaving removes them, whatever happened inside
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

CLONE_NEWNET = 0x40000000
NEEDS_ROOT = "network namespaces need root"


def is_root() -> bool:
    return os.geteuid() == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A namespace, and the address by which the others reach it."""

    namespace: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """The arguments as a command that runs on this host."""
        return ["nsenter", f"--net=/run/netns/{self.namespace}", *arguments]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and those it starts, are on this host meanwhile."""
        with open("/proc/thread-self/ns/net") as before, open(f"/run/netns/{self.namespace}") as here:
            _set_namespace(here.fileno())
            try:
                yield
            finally:
                _set_namespace(before.fileno())


class Network:
    """Hosts 10.77.0.2, 10.77.0.3, ...; each routes everything to the bridge, as if more lay behind it.

    Example:
        with Network("head", "buffer") as network:
            subprocess.run(network["head"].command("ping", "-c1", network["buffer"].address))
    """

    def __init__(self, *names: str) -> None:
        self._tag = f"rocstar-{secrets.token_hex(3)}"
        self._hosts = {
            name: Host(namespace=f"{self._tag}-{name}", address=f"10.77.0.{number}")
            for number, name in enumerate(names, start=2)
        }

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def __enter__(self) -> Network:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        _ip("netns", "add", self._tag)
        _ip("-n", self._tag, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._tag, "addr", "add", "10.77.0.1/24", "dev", "bridge")
        _ip("-n", self._tag, "link", "set", "bridge", "up")
        for number, host in enumerate(self._hosts.values()):
            port, far = f"port{number}", ("netns", host.namespace)
            _ip("netns", "add", host.namespace)
            _ip("-n", self._tag, "link", "add", port, "type", "veth", "peer", "name", "eth0", *far)
            _ip("-n", self._tag, "link", "set", port, "master", "bridge", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
            _ip("-n", host.namespace, "route", "add", "default", "via", "10.77.0.1")

    def _remove(self) -> None:
        for namespace in (self._tag, *(host.namespace for host in self._hosts.values())):
            if os.path.exists(f"/run/netns/{namespace}"):
                _ip("netns", "del", namespace)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def _set_namespace(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
