"""Hostile programs: each test attacks one property of the sandbox, and the module leaves nothing behind."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox.api import Status, is_failure, is_infra
from tests.sandbox_node import PYTHONS_OWN_TMP, Node, eventually, leaving_nothing

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with leaving_nothing(workers=2, spare=False, wall_s=1.0, cpu_s=5.0, memory_mib=128) as node:
        yield node


def test_a_busy_loop_is_stopped_at_the_limit_and_its_output_kept(node: Node) -> None:
    begun = time.monotonic()
    result = node.run("print('before')\nwhile True: pass")
    assert result.status is Status.TIMEOUT
    assert result.stdout == "before\n"
    assert time.monotonic() - begun < 1.5
    assert result.to_text() == "before\ntimed out"


def test_cpu_time_has_a_limit_of_its_own(node: Node) -> None:
    result = node.run("while True: pass", wall_s=10.0, cpu_s=0.3)
    assert result.status is Status.CPU_TIMEOUT
    assert 0.29 <= result.cpu_s < 0.6


def test_an_ignored_alarm_does_not_prolong_a_sleep(node: Node) -> None:
    code = (
        "import signal, time\n"
        "for n in range(1, 65):\n"
        "  try: signal.signal(n, signal.SIG_IGN)\n"
        "  except Exception: 0\n"
        "time.sleep(60)"
    )
    assert node.run(code, wall_s=0.5).status is Status.TIMEOUT


@pytest.mark.parametrize("code", ["10**10**8", "import re\nre.match('(a+)+$', 'a' * 40 + 'b')"])
def test_c_code_that_never_returns_is_stopped(node: Node, code: str) -> None:
    assert node.run(code, wall_s=0.5).status is Status.TIMEOUT


def test_one_allocation_beyond_the_limit_is_memory(node: Node) -> None:
    result = node.run("x = 1\nbytearray(4 << 30)")
    assert (result.status, result.line) == (Status.MEMORY, 2)
    assert result.to_text() == "out of memory (line 2)"


def test_a_growing_list_is_memory(node: Node) -> None:
    assert node.run("a = []\nwhile True: a.append(bytes(1 << 20))", wall_s=5.0).status is Status.MEMORY


def test_a_tree_of_processes_shares_one_memory_limit(node: Node) -> None:
    code = (
        "import os, time\n"
        "for n in range(6):\n"
        "    if os.fork() == 0:\n"
        "        block = bytearray(100 << 20)\n"
        "        time.sleep(60)\n"
        "for n in range(6):\n"
        "    pid, status = os.wait()\n"
        "    print(os.WTERMSIG(status))\n"
        "    break\n"
    )
    if not node.server._shards[0].cgroups:
        pytest.skip("no writable memory cgroup on this host")
    result = node.run(code, wall_s=5.0)
    assert result.status in (Status.MEMORY, Status.OK), result
    assert result.status is Status.MEMORY or result.stdout == "9\n"


@pytest.mark.parametrize("stream", [1, 2])
def test_a_flood_of_output_is_cut_and_stopped(node: Node, stream: int) -> None:
    begun = time.monotonic()
    result = node.run(f"import os\nfor n in range(1600): os.write({stream}, b'%06d' % n + b'x' * 65530)")
    assert result.status is Status.OUTPUT_LIMIT
    assert result.truncated
    kept = result.stdout if stream == 1 else result.stderr
    assert kept.startswith("000000x")
    assert len(kept) < 70_000
    assert time.monotonic() - begun < 0.9


def test_endless_printing_leaves_the_supervisor_small(node: Node) -> None:
    result = node.run("while True: print('y' * 1000)", output_kib=2048)
    assert result.status is Status.OUTPUT_LIMIT
    for pid in node.supervisors():
        rss_kib = int(Path(f"/proc/{pid}/status").read_text().split("VmHWM:")[1].split()[0])
        assert rss_kib < 64 << 10


def test_a_fork_bomb_is_bounded_and_none_of_it_stays(node: Node) -> None:
    code = (
        "import os, time\n"
        "made = 0\n"
        "for n in range(300):\n"
        "    try: pid = os.fork()\n"
        "    except BlockingIOError: break\n"
        "    if pid == 0: time.sleep(100); os._exit(0)\n"
        "    made += 1\n"
        "print(made)\n"
    )
    result = node.run(code, wall_s=5.0)
    assert result.status is Status.OK, result
    assert 1 <= int(result.stdout) <= 32
    assert eventually(lambda: not node.guests())


def test_threads_are_bounded(node: Node) -> None:
    code = (
        "import threading, time\n"
        "for n in range(400): threading.Thread(target=time.sleep, args=(100,), daemon=True).start()"
    )
    result = node.run(code)
    assert result.status is Status.ERROR
    assert result.exception.startswith("RuntimeError")


def test_an_orphan_that_holds_the_pipe_delays_nothing_and_dies(node: Node) -> None:
    code = "import subprocess\nsubprocess.Popen(['sleep', '50'], start_new_session=True)\nprint('done')"
    begun = time.monotonic()
    result = node.run(code)
    assert (result.status, result.stdout) == (Status.OK, "done\n")
    assert time.monotonic() - begun < 0.7
    assert eventually(lambda: not node.guests())


HOSTS = ["/etc/shadow", str(Path.home() / ".bashrc"), __file__, "/home", "/proc/1/environ", "/sys/kernel"]


@pytest.mark.parametrize("path", HOSTS)
def test_the_hosts_files_are_not_there(node: Node, path: str) -> None:
    code = (
        f"import os\n"
        f"try: print(os.listdir({path!r}) if os.path.isdir({path!r}) else open({path!r}).read(99))\n"
        f"except OSError as error: print(type(error).__name__)"
    )
    result = node.run(code)
    assert result.stdout in ("FileNotFoundError\n", "PermissionError\n"), result


def test_passwd_names_nobody_of_the_host(node: Node) -> None:
    result = node.run("print(open('/etc/passwd').read())")
    assert {line.split(":")[0] for line in result.stdout.split()} == {"root", "sandbox"}


def test_files_live_as_long_as_their_call(node: Node) -> None:
    code = (
        "import os, tempfile\n"
        "open('/tmp/mine', 'x').write('1')\n"
        "open('here', 'x').write('1')\n"
        "open(os.path.expanduser('~/home'), 'x').close()\n"
        "print(len(tempfile.mkdtemp()) > 0)"
    )
    for _ in range(4):
        assert node.run(code).stdout == "True\n"
    assert node.run("import os; print(sorted(os.listdir('/tmp')))").stdout == f"{PYTHONS_OWN_TMP}\n"


@pytest.mark.parametrize("path", ["/usr/bin/x", "/x", "/etc/passwd", "/dev/x"])
def test_nothing_but_tmp_can_be_written(node: Node, path: str) -> None:
    result = node.run(f"open({path!r}, 'a')")
    assert result.exception.split(":")[0] in ("OSError", "PermissionError"), result


def test_a_huge_file_is_refused(node: Node) -> None:
    result = node.run("with open('/tmp/big', 'wb') as f:\n  for n in range(200): f.write(bytes(1 << 20))")
    assert result.status in (Status.ERROR, Status.MEMORY, Status.SIGNAL)
    assert result.status is not Status.ERROR or result.exception.startswith("OSError")


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
def test_there_is_no_network(node: Node, family: str) -> None:
    result = node.run(
        f"import socket\nsocket.socket(socket.{family}, socket.SOCK_RAW if 'NET' == 'x' else socket.SOCK_STREAM)"
    )
    assert result.exception.startswith("PermissionError"), result


def test_environment_and_descriptors_are_bare(node: Node) -> None:
    result = node.run(
        "import os\n"
        "print(sorted(os.environ))\n"
        "for n in range(4, 256):\n"
        "  try: os.fstat(n); print(n)\n"
        "  except OSError: pass"
    )
    assert result.stdout == "['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'TMPDIR']\n"


def test_no_other_calls_data_is_in_memory(node: Node) -> None:
    """Neither an earlier program nor a gold answer was ever in the process that a call is forked from."""
    secret = "".join(("nobody", "should", "see"))
    node.run(f"x = '{secret}'")
    node.check_all([(f"\\text{{{secret}}}", f"\\sqrt{{{secret}}}")])
    code = (
        "import gc\n"
        "needle = ''.join(('nobody', 'should', 'see'))\n"
        "texts = (t for o in gc.get_objects() for t in gc.get_referents(o) if isinstance(t, (str, bytes)))\n"
        "print(sum(needle in str(t) and t is not needle for t in texts))"
    )
    assert node.run(code, wall_s=20.0, cpu_s=20.0).stdout == "0\n"
    assert int(node.run(f"also = ['{secret}', 1]\n{code}", wall_s=20.0, cpu_s=20.0).stdout) > 0, "it would be found"


@pytest.mark.parametrize("target", ["os.getppid()", "-1", "1"])
def test_a_kill_stays_inside(node: Node, target: str) -> None:
    zygotes, supervisors = node.zygotes(), node.supervisors()
    node.run(
        f"import os, signal\nfor n in (15, 9):\n  try: os.kill({target}, n)\n  except OSError: pass\nprint('here')"
    )
    assert (node.zygotes(), node.supervisors()) == (zygotes, supervisors)
    assert node.run("print(1)").stdout == "1\n"


@pytest.mark.parametrize(
    ("call", "number"),
    [("unshare", 272), ("mount", 165), ("ptrace", 101), ("setns", 308), ("bpf", 321), ("keyctl", 250), ("kexec", 246)],
)
def test_dangerous_system_calls_are_refused(node: Node, call: str, number: int) -> None:
    code = (
        f"import ctypes\n"
        f"libc = ctypes.CDLL(None, use_errno=True)\n"
        f"print(libc.syscall({number}, 0, 0, 0, 0, 0), ctypes.get_errno())"
    )
    assert node.run(code).stdout == "-1 1\n", call


def test_a_namespace_cannot_be_made_by_clone(node: Node) -> None:
    code = (
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0), ctypes.get_errno())"
    )
    assert node.run(code).stdout == "-1 1\n"


def test_no_privilege_is_left(node: Node) -> None:
    code = "import os\nprint(os.getuid() > 0, os.getresuid() == (os.getuid(),) * 3, os.getgroups())\nos.setuid(0)"
    result = node.run(code)
    assert result.stdout == "True True []\n"
    assert result.exception.startswith("PermissionError")


def test_a_forged_control_record_cannot_blame_the_sandbox(node: Node) -> None:
    for record in ("[2, 'it was not me']", "[0, 'internal', '', '', 0, 0, 0.0]", "'junk'"):
        code = (
            f"import os, struct, msgpack\n"
            f"body = msgpack.packb({record})\n"
            f"os.write(3, struct.pack('<I', len(body)) + body)\n"
            f"import time; time.sleep(9)"
        )
        result = node.run(code)
        assert is_failure(result.status), result
        assert not is_infra(result.status)


def test_a_program_that_claims_to_be_done_is_ended(node: Node) -> None:
    code = (
        "import os, struct, msgpack, time\n"
        "body = msgpack.packb([0, 'ok', '7', '', 0, 0, 0.0])\n"
        "os.write(3, struct.pack('<I', len(body)) + body)\n"
        "while True: pass"
    )
    begun = time.monotonic()
    node.run(code)
    assert time.monotonic() - begun < 0.5
    assert eventually(lambda: not node.guests())
