"""Assembles the system call filter of a guest: a classic BPF program over the x86-64 call numbers.

Consumes    the tables below
Produces    the program's bytes: an allowlist; what is not on it gets EPERM, sockets EACCES, the unknown ENOSYS
Waits for   nothing: pure
Invariant   no call that makes a namespace, mounts, traces, opens a socket or reaches the kernel's odd corners passes
"""

from __future__ import annotations

import errno
import struct

MACHINE = "x86_64"
_AUDIT_ARCH_X86_64 = 0xC000_003E
_NEW_NAMESPACES = 0x7E02_0000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
_AF_UNIX = 1

_LD_WORD, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NR, _OFFSET_ARCH, _OFFSET_ARG0, _OFFSET_ARG1 = 0, 4, 16, 24
_ALLOW, _KILL, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000

_CLONE, _IOCTL, _SOCKETPAIR = 56, 16, 53
_SETPGID, _SETSID, _KILL_CALL = 109, 112, 62
_LAST_KNOWN = 334

# Ranges of allowed numbers, inclusive.
_ALLOWED = (
    (0, 15), (17, 28), (32, 40), (44, 48), (51, 52), (54, 55), (57, 63), (72, 100), (102, 102), (104, 104),
    (107, 112), (115, 115), (118, 118), (120, 121), (124, 125), (127, 133), (137, 138), (140, 141), (143, 143),
    (145, 152), (157, 158), (160, 160), (186, 187), (191, 196), (200, 204), (211, 211), (213, 213), (217, 219),
    (221, 226), (228, 235), (239, 239), (247, 247), (252, 255), (257, 271), (273, 276), (280, 287), (289, 297),
    (302, 302), (309, 309), (315, 316), (318, 319), (322, 322), (324, 328), (332, 332), (334, 334),
    (424, 424), (434, 434), (436, 437), (439, 439), (441, 441), (449, 449),
)  # fmt: skip
# socket, connect, accept, bind, listen, accept4
_NETWORK = (41, 42, 43, 49, 50, 288)


def _instruction(code: int, k: int, jump_true: int = 0, jump_false: int = 0) -> bytes:
    return struct.pack("<HBBI", code, jump_true, jump_false, k)


def _refuse(number: int) -> bytes:
    return _instruction(_RET, _ERRNO | number)


_PASS = _instruction(_RET, _ALLOW)

# A call that is allowed for some arguments only; the number is spent by then, so the argument may be loaded over it.
_SPECIAL = {
    _CLONE: _instruction(_LD_WORD, _OFFSET_ARG0)
    + _instruction(_JSET, _NEW_NAMESPACES, 0, 1)
    + _refuse(errno.EPERM)
    + _PASS,
    _IOCTL: _instruction(_LD_WORD, _OFFSET_ARG1)
    + _instruction(_JEQ, _TIOCSTI, 1, 0)
    + _instruction(_JEQ, _TIOCLINUX, 0, 1)
    + _refuse(errno.EPERM)
    + _PASS,
    _SOCKETPAIR: _instruction(_LD_WORD, _OFFSET_ARG0)
    + _instruction(_JEQ, _AF_UNIX, 1, 0)
    + _refuse(errno.EACCES)
    + _PASS,
}


# Without a pid namespace kill(-1, ...) would reach every process of the user.
_KILL_BUT_ALL = (
    _instruction(_LD_WORD, _OFFSET_ARG0) + _instruction(_JEQ, 0xFFFF_FFFF, 0, 1) + _refuse(errno.EPERM) + _PASS
)


def _decisions(keep_group: bool) -> list[tuple[int, bytes]]:
    """(first number, what to do from it on), ascending and without repetition."""
    action = {number: _refuse(errno.EPERM) for number in range(_LAST_KNOWN + 1)}
    for low, high in _ALLOWED:
        action.update(dict.fromkeys(range(low, high + 1), _PASS))
    action.update(dict.fromkeys(_NETWORK, _refuse(errno.EACCES)))
    action.update(_SPECIAL)
    if keep_group:
        action |= {_SETPGID: _refuse(errno.EPERM), _SETSID: _refuse(errno.EPERM), _KILL_CALL: _KILL_BUT_ALL}
    unknown = _refuse(errno.ENOSYS)
    steps: list[tuple[int, bytes]] = []
    for number in range(max(action) + 2):
        todo = action.get(number, unknown)
        if not steps or steps[-1][1] != todo:
            steps.append((number, todo))
    return steps


def _search(steps: list[tuple[int, bytes]]) -> bytes:
    """Binary search over the steps, as nested jumps."""
    if len(steps) == 1:
        return steps[0][1]
    middle = len(steps) // 2
    below, above = _search(steps[:middle]), _search(steps[middle:])
    return _instruction(_JGE, steps[middle][0], len(below) // 8, 0) + below + above


def assemble(*, keep_group: bool = False) -> bytes:
    """The program. `keep_group`: a guest may not leave its process group (how it is killed without a pid namespace)."""
    return (
        _instruction(_LD_WORD, _OFFSET_ARCH)
        + _instruction(_JEQ, _AUDIT_ARCH_X86_64, 1, 0)
        + _instruction(_RET, _KILL)
        + _instruction(_LD_WORD, _OFFSET_NR)
        + _search(_decisions(keep_group))
    )
