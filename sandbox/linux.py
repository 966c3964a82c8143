"""The system calls, and the numbers of processes, that Python's standard library has no name for.

Consumes    plain numbers, paths, descriptors
Produces    effects; OSError with the call's name when the kernel refuses
Waits for   nothing
Invariant   every foreign function is bound at import, so that a forked child only calls it
"""

from __future__ import annotations

import ctypes
import os
from typing import Final

CLONE_NEWNS: Final = 0x0002_0000
CLONE_NEWUTS: Final = 0x0400_0000
CLONE_NEWIPC: Final = 0x0800_0000
CLONE_NEWUSER: Final = 0x1000_0000
CLONE_NEWPID: Final = 0x2000_0000
CLONE_NEWNET: Final = 0x4000_0000

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_BIND: Final = 0x1000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 0x4_0000
MNT_DETACH: Final = 2

MADV_COLLAPSE: Final = 25

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_SECCOMP: Final = 22
_PR_SET_NO_NEW_PRIVS: Final = 38
_SECCOMP_MODE_FILTER: Final = 2
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_SYS_PIVOT_ROOT: Final = 155
_SYS_CAPSET: Final = 126
_SYS_MOUNT_SETATTR: Final = 442

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]
_libc.umount2.argtypes = [ctypes.c_char_p, ctypes.c_int]
_libc.unshare.argtypes = [ctypes.c_int]
_libc.setns.argtypes = [ctypes.c_int, ctypes.c_int]
_libc.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.syscall.restype = ctypes.c_long
_mount, _unshare, _setns, _prctl = _libc.mount, _libc.unshare, _libc.setns, _libc.prctl


class FilterProgram(ctypes.Structure):
    """struct sock_fprog: a classic BPF program and its length in instructions."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    )


def _fail(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` for new ones (a new pid namespace begins with the next child)."""
    if _unshare(flags):
        raise _fail(f"unshare({flags:#x})")


def setns(fd: int, kind: int) -> None:
    """Enter the namespace of `kind` that the process behind pidfd `fd` lives in."""
    if _setns(fd, kind):
        raise _fail("setns")


def mount(source: bytes, target: bytes, kind: bytes | None, flags: int, options: bytes | None = None) -> None:
    """mount(2)."""
    if _mount(source, target, kind, flags, options):
        raise _fail(f"mount {kind.decode() if kind else 'bind'} on {target.decode()}")


def seal_mount(target: str, flags: int) -> None:
    """Add MS_* `flags` (read-only, nosuid, nodev, noexec) to the mounts at and below `target`."""
    attr = _MountAttr(attr_set=flags)
    path = ctypes.c_char_p(os.fsencode(target))
    size = ctypes.c_size_t(ctypes.sizeof(attr))
    if _libc.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, path, _AT_RECURSIVE, ctypes.byref(attr), size):
        raise _fail(f"mount_setattr on {target} (needs Linux 5.12)")


def pivot_into(new_root: str) -> None:
    """Make the mount at `new_root` the root and let go of the old one."""
    os.chdir(new_root)
    dot = ctypes.c_char_p(b".")
    if _libc.syscall(_SYS_PIVOT_ROOT, dot, dot):
        raise _fail("pivot_root")
    if _libc.umount2(b".", MNT_DETACH):
        raise _fail("umount of the old root")
    os.chdir("/")


def no_new_privs() -> None:
    """From here on no exec gains privileges."""
    if _prctl(_PR_SET_NO_NEW_PRIVS, 1, None, 0, 0):
        raise _fail("prctl(PR_SET_NO_NEW_PRIVS)")


def die_with_parent(number: int) -> None:
    """Get signal `number` when the parent (thread) ends."""
    if _prctl(_PR_SET_PDEATHSIG, number, None, 0, 0):
        raise _fail("prctl(PR_SET_PDEATHSIG)")


def name_process(name: bytes) -> None:
    """What lists of processes show for this one; at most 15 bytes."""
    if _prctl(_PR_SET_NAME, ctypes.addressof(ctypes.create_string_buffer(name)), None, 0, 0):
        raise _fail("prctl(PR_SET_NAME)")


def install_filter(program: FilterProgram) -> None:
    """Put the system call filter over this process and its descendants."""
    if _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program), 0, 0):
        raise _fail("prctl(PR_SET_SECCOMP)")


def drop_capabilities() -> None:
    """Give up every capability of this process (where its uid cannot be changed)."""
    header = (ctypes.c_uint32 * 2)(0x2008_0522, 0)
    data = (ctypes.c_uint32 * 6)()
    if _libc.syscall(_SYS_CAPSET, header, data):
        raise _fail("capset")


def collapse(start: int, length: int) -> bool:
    """Put an anonymous range into huge pages (Linux 6.1); False where the kernel does not."""
    return not _libc.madvise(start, length, MADV_COLLAPSE)


def process_times(pid: int) -> tuple[str, float]:
    """(state, CPU-seconds with those of waited-for children) of a process; ("R", 0) when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "R", 0.0
    return fields[0].decode(), sum(int(field) for field in fields[11:15]) / _TICKS
