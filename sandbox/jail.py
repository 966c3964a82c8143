"""The walls round a guest: what a zygote builds once, and what each child adds for itself.

Consumes    a JailPlan
Produces    a process that sees a read-only root and a private /tmp, has no network, no privileges, few resources
Waits for   nothing
Invariant   full isolation is complete or an Unavailable is raised that names the missing piece; nothing is skipped

Covered (full)  other processes (own pid namespace per slot), files (read-only system, empty environment, /tmp of its
                own, no /proc), network and IPC (namespaces per zygote, calls refused), privileges, resources.
Not covered     the kernel is shared: for hostile third parties' code put the node into a virtual machine. Timing of
                neighbours can be observed. Without writable cgroups memory is limited per process, not per tree.
"""

from __future__ import annotations

import os
import platform
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass

from sandbox import linux, seccomp

TMP_BYTES = 64 << 20
FILE_BYTES = 64 << 20
MAX_PROCESSES = 32
MAX_FILES = 256
_DATA_SLACK_BYTES = 32 << 20
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_KEPT = "/.kept"
_ETC = {
    "passwd": "root:x:0:0::/:/bin/false\nsandbox:x:65534:65534::/tmp:/bin/false\n",
    "group": "root:x:0:\nsandbox:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n",
}


class Unavailable(Exception):
    """The host does not offer a piece of isolation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JailPlan:
    """How a zygote and its children are walled in."""

    full: bool
    """Namespaces and a read-only root; else resource limits and what else is permitted."""
    first_uid: int
    """uid of slot 0; slot i runs as first_uid + i % uids. 0: uids cannot be changed (not root)."""
    uids: int = 32
    """Number of uids."""

    def uid(self, slot: int) -> int:
        """What a slot's children run as."""
        return self.first_uid + slot % self.uids


def attempt(piece: str, action: Callable[[], None]) -> None:
    """Run one step of building the walls.

    Raises:
        Unavailable: the step failed; the message names `piece`, the kernel's reason and the remedy.
    """
    try:
        action()
    except OSError as error:
        raise Unavailable(
            f"sandbox.isolation = full needs {piece}, which this host refuses ({error}): allow it, run the node as "
            f'root or in a virtual machine, or set sandbox.isolation = "rlimits" for code that is not hostile'
        ) from error


Restore = list[tuple[bytes, bytes]]
"""(where it can be had, where it belongs) of directories under /tmp that Python itself lives in."""


def enter(plan: JailPlan) -> Restore:
    """Wall in the zygote: namespaces of its own and, with full isolation, the read-only root."""
    if not plan.full:
        return []
    if platform.machine() != seccomp.MACHINE:
        raise Unavailable(f"the system call filter is written for {seccomp.MACHINE}, this is {platform.machine()}")
    attempt("a mount namespace", lambda: linux.unshare(linux.CLONE_NEWNS))
    attempt("network, IPC and UTS namespaces", _leave_network)
    attempt("a private mount tree", lambda: linux.mount(b"none", b"/", None, linux.MS_REC | linux.MS_PRIVATE))
    attempt("a root of bind mounts", _build_root)
    attempt("pivot_root", lambda: linux.pivot_into("/tmp"))
    below_tmp = [path for path in _visible() if path.startswith("/tmp/")]
    return [(f"{_KEPT}/{n}".encode(), path.encode()) for n, path in enumerate(below_tmp)]


def _leave_network() -> None:
    linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWIPC | linux.CLONE_NEWUTS)


def become_own_root(plan: JailPlan) -> None:
    """Without root's privileges: take them inside a user namespace, as process 1 of a pid namespace that it owns.

    The calling process stays outside as a parent that ends when the other one does.
    """
    if not plan.full or plan.first_uid:
        return
    attempt("user namespaces", _enter_user_namespace)
    pid = os.fork()
    if pid:
        os.closerange(3, 1 << 16)
        os.close(0)
        os.waitpid(pid, 0)
        os._exit(0)
    linux.die_with_parent(signal.SIGKILL)


def _enter_user_namespace() -> None:
    uid, gid = os.getuid(), os.getgid()
    linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWPID)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"0 {uid} 1")
    _write("/proc/self/gid_map", f"0 {gid} 1")


def _write(path: str, text: str, dir_fd: int | None = None) -> None:
    fd = os.open(path, os.O_WRONLY, dir_fd=dir_fd)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _build_root() -> None:
    """Lay out the new root on a tmpfs at /tmp: system directories, Python, a few devices, empty /tmp and /proc."""
    base = "/tmp"
    kept = {path: os.open(path, os.O_PATH) for path in _visible()}
    devices = {name: os.open(f"/dev/{name}", os.O_PATH) for name in _DEVICES}
    links = {path: os.readlink(path) for path in _SYSTEM if os.path.islink(path)}
    linux.mount(b"sandbox", base.encode(), b"tmpfs", 0, b"mode=755,size=1m")
    for name in ("tmp", "proc", "dev", "etc", _KEPT):
        os.mkdir(f"{base}/{name}")
    for name, text in _ETC.items():
        with open(f"{base}/etc/{name}", "w") as file:
            file.write(text)
    for path, target in links.items():
        os.symlink(target, base + path)
    below_tmp = 0
    for path, fd in kept.items():
        if path.startswith("/tmp/"):  # a call's own /tmp will hide it: kept elsewhere too, to be put back from there
            os.mkdir(f"{base}{_KEPT}/{below_tmp}")
            _bind(os.dup(fd), f"{base}{_KEPT}/{below_tmp}", linux.MS_NODEV)
            below_tmp += 1
        os.makedirs(base + path, exist_ok=True)
        _bind(fd, base + path, linux.MS_NODEV)
    for name, fd in devices.items():
        os.close(os.open(f"{base}/dev/{name}", os.O_CREAT | os.O_WRONLY))
        _bind(fd, f"{base}/dev/{name}", linux.MS_NOEXEC)
    # POSIX semaphores and shared memory live under /dev/shm: let that be the guest's own /tmp.
    os.symlink("/tmp", f"{base}/dev/shm")
    linux.seal_mount(base, linux.MS_RDONLY | linux.MS_NOSUID)


def _visible() -> list[str]:
    """Directories that guests see, parents before children: the system's, this Python's, its packages'."""
    wanted = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    wanted += [os.path.realpath(sys.base_prefix), sys.base_prefix, sys.prefix]
    wanted += [path for path in sys.path if path.endswith("site-packages") and os.path.isdir(path)]
    chosen: list[str] = []
    for path in sorted({os.path.abspath(path) for path in wanted}):
        if not any(path == other or path.startswith(other + "/") for other in chosen):
            chosen.append(path)
    return chosen


def _bind(fd: int, target: str, flags: int) -> None:
    linux.mount(f"/proc/self/fd/{fd}".encode(), target.encode(), None, linux.MS_BIND | linux.MS_REC)
    os.close(fd)
    linux.seal_mount(target, flags | linux.MS_RDONLY | linux.MS_NOSUID)


def raise_file_limit() -> None:
    """As many descriptors as the host allows: a session keeps several."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def preset_limits() -> None:
    """Limits that are the same for each child, set once on the zygote and inherited."""
    raise_file_limit()
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def plain_tmp(zygote_pid: int, slot: int) -> str:
    """Where a call works when it cannot have a /tmp of its own; the supervisor removes it afterwards."""
    return f"/tmp/rocstar-call-{zygote_pid}-{slot}"


def own_tmp(plan: JailPlan, procfs: int, slot: int, restore: Restore) -> None:
    """First part of a child's walls: mounts and, where uids cannot be changed, a user namespace of its own."""
    if not plan.full:
        path = plain_tmp(os.getppid(), slot)
        os.mkdir(path, 0o700)
        if plan.first_uid:
            os.chown(path, plan.uid(slot), plan.uid(slot))
        os.chdir(path)
        os.environ.update(HOME=path, TMPDIR=path)
        return
    if plan.first_uid:
        linux.unshare(linux.CLONE_NEWNS)
    else:
        linux.unshare(linux.CLONE_NEWUSER | linux.CLONE_NEWNS)
        _write("self/setgroups", "deny", procfs)
        _write("self/uid_map", "1000 0 1", procfs)
        _write("self/gid_map", "1000 0 1", procfs)
    options = b"mode=1777,nr_inodes=8k,size=%d" % TMP_BYTES
    linux.mount(b"tmp", b"/tmp", b"tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    for source, target in restore:
        os.makedirs(target)
        linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)
    os.chdir("/tmp")


def drop_privileges(plan: JailPlan, slot: int) -> None:
    """Second part: few processes, a uid of its own, no capabilities, no way to get any."""
    resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_FILES, MAX_FILES))
    if plan.first_uid:
        uid = plan.uid(slot)
        os.setgroups(())
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    elif plan.full:
        linux.drop_capabilities()
    linux.no_new_privs()


def limit_call(base_data_bytes: int, memory_mib: int, cpu_s: float) -> None:
    """Third part: what this call may use. The supervisor stops it at cpu_s exactly; this limit is the backstop."""
    data = base_data_bytes + (memory_mib << 20)
    resource.setrlimit(resource.RLIMIT_DATA, (data, data + _DATA_SLACK_BYTES))
    whole_s = int(cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (whole_s, whole_s + 1))


def relax_memory() -> None:
    """Let a guest that ran out of memory have a little more, to say so."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
