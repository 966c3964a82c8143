"""`python -m tests.chaos`: see the package. Exits 0 when nothing was lost, doubled, broken or hung, else 1.

Consumes    minutes, a seed, roles, overrides of the quickstart's recipe
Produces    the report (--json: one object), the run directory with chaos.json beside its own files
Waits for   the run: its first turn, then blow after blow; then its goal (--steps), or, without one, a checkpoint at
            SIGTERM and a resume of one more step, which evaluates
Unblocked by  the run's end; patience, after which what is waited for counts as hung; SIGINT, SIGTERM
Invariant   no process is left, however this one ends
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests import audit
from tests.chaos import verdict
from tests.chaos.plan import ROLES, Blow, plan
from tests.chaos.verdict import Dealt
from tests.chaos.victim import ROOT, SMALL, Victim, boot_error_s, send
from tests.chaos.witness import Witness

TICK_S = 0.25
PATIENCE_S = 300.0
"""Longest time without anything new that is durable, and longest wait for an end."""
ABSENT_PATIENCE_S = 60.0
"""A role that is down when its turn comes is awaited this long."""
REACHED, INTERRUPTED = 0, 75


@dataclass(kw_only=True, slots=True)
class Deeds:
    """What was done, and what was seen of processes."""

    dealt: list[Dealt] = field(default_factory=list)
    born: dict[str, set[float]] = field(default_factory=lambda: defaultdict(set))
    hung: list[str] = field(default_factory=list)
    minutes: float = 0.0
    """of blows"""


class Chaos:
    """One run under chaos."""

    def __init__(
        self, victim: Victim, witness: Witness, blows: Iterator[Blow], roles: Sequence[str], *, one_by_one: bool
    ) -> None:
        self._victim, self._witness, self._blows, self._roles = victim, witness, blows, roles
        self._one_by_one = one_by_one
        self._wakes: list[tuple[float, psutil.Process]] = []
        self._boot_error_s = boot_error_s()
        self.deeds = Deeds()

    def run(self, minutes: float, steps: int | None) -> int | None:
        """From the start to the end; the last command's exit code, None when it hung."""
        victim = self._victim
        victim.start(f"run.steps={steps or 100_000}")
        if self._until(lambda: bool(self._witness.notes.turns), "the first turn"):
            self._strike(minutes)
        self._wake(everything=True)
        if steps is None and victim.exit_code is None and not self.deeds.hung:
            victim.interrupt()
            if self._ended("the end after SIGTERM") == INTERRUPTED:
                self._witness.look()
                victim.resume(f"run.steps={len(self._witness.notes.batches) + 1}")
        return self._ended("the goal")

    def _strike(self, minutes: float) -> None:
        begun_s = time.monotonic()
        self._blow_after_blow(begun_s + 60 * minutes)
        self.deeds.minutes = (time.monotonic() - begun_s) / 60

    def _blow_after_blow(self, end_s: float) -> None:
        for blow in self._blows:
            at_s = time.monotonic() + blow.gap_s
            if not self._until(lambda at_s=at_s: time.monotonic() >= min(at_s, end_s), ""):
                return
            if time.monotonic() >= end_s:
                return
            self._deal(blow)
            if self._one_by_one and not self._until(self._is_back, f"{blow.role} to be back"):
                return

    def _is_back(self) -> bool:
        """Whether the role that was killed last brings something about again."""
        last = self.deeds.dealt[-1]
        found = verdict.recoveries(self._victim.directory, self._witness.notes, [last], time.time())
        return not last.hit or found.get(last.role, [None])[0] is not None

    def _until(self, true: Any, what: str) -> bool:
        """Waits for `true()`; False when the run ended first, or brought nothing new for too long."""
        while not true():
            if self._victim.exit_code is not None:
                return False
            self._wake()
            self._see_births()
            silent_s = time.time() - self._witness.notes.news_s
            if silent_s > PATIENCE_S:
                self.deeds.hung.append(f"nothing new was durable for {silent_s:.0f} s; {what}")
                return False
            time.sleep(TICK_S)
        return True

    def _ended(self, what: str) -> int | None:
        """The command's exit code; one that brings nothing new for too long is ended, and None."""
        if self.deeds.hung:
            return None
        self._until(lambda: False, what)
        return self._victim.exit_code

    def _see_births(self) -> None:
        for role in self._roles:
            process = self._victim.head(role)
            if process is not None:
                self.deeds.born[role].add(process.create_time() + self._boot_error_s)

    def _deal(self, blow: Blow) -> None:
        process: list[psutil.Process] = []

        def there() -> bool:
            head = self._victim.head(blow.role)
            process[:] = [head] if head is not None else []
            return bool(process) or time.monotonic() > give_up_s

        give_up_s = time.monotonic() + ABSENT_PATIENCE_S
        if self._until(there, f"a process of {blow.role}"):
            hit = bool(process) and self._hit(blow, process[0])
            at_s = time.time()  # from now on the dead one brings about nothing: what comes is another life's
            pid = process[0].pid if process else 0
            self.deeds.dealt.append(Dealt(role=blow.role, kind=blow.kind, at_s=at_s, pid=pid, hit=hit))
            print(f"{blow.number}: {blow.kind} {blow.role}, process {pid}", file=sys.stderr, flush=True)

    def _hit(self, blow: Blow, process: psutil.Process) -> bool:
        if blow.kind == "kill":
            return send(process, signal.SIGKILL)
        if blow.kind in ("stop", "pause"):
            if blow.kind == "pause":
                self._wakes.append((time.monotonic() + blow.pause_s, process))
            return send(process, signal.SIGSTOP)
        if blow.kind == "cut":
            return self._victim.cut(process) > 0
        try:
            children = process.children(recursive=True)
        except psutil.NoSuchProcess:
            return False
        return bool(children) and send(children[int(blow.pick * len(children))], signal.SIGKILL)

    def _wake(self, *, everything: bool = False) -> None:
        now_s = time.monotonic()
        for at_s, process in self._wakes:
            if everything or at_s <= now_s:
                send(process, signal.SIGCONT)
        self._wakes = [] if everything else [(at_s, process) for at_s, process in self._wakes if at_s > now_s]


def report(
    directory: Path, witness: Witness, deeds: Deeds, exit_code: int | None, *, minutes: float, started_s: float
) -> dict[str, Any]:
    """The report's fields; `findings` says what lies behind those that are not 0. `minutes`: of blows, as asked for."""
    witness.look()
    notes, end_s = witness.notes, time.time()
    audited = audit.report.audit(directory)
    recovered = verdict.recoveries(directory, notes, deeds.dealt, end_s)
    start_ups = verdict.start_ups(notes, deeds.born, directory)
    hung = deeds.hung + [f"{role} did not come back" for role, some in recovered.items() if None in some]
    lost = verdict.lost(directory, notes) + verdict.missing(directory, notes)
    twice = verdict.twice(directory, notes)
    not_once = verdict.not_once(directory, notes, verdict.replay(directory))
    beyond, age_minus_s = verdict.older_than_promised(directory)
    evaluation = audited.figures["evaluations"].get("end", {})
    return {
        "kills": dict(Counter(blow.role for blow in deeds.dealt if blow.kind == "kill" and blow.hit)),
        "turns_acked": len(notes.turns),
        "turns_lost": len(lost),
        "turns_twice": len(twice),
        "batches_not_once": len(not_once),
        "promise_broken": beyond + len(audited.findings["staleness"]),
        "hung_waits": len(hung),
        "recovery_s": {role: _spread([s for s in some if s is not None]) for role, some in sorted(recovered.items())},
        "accuracy": evaluation.get("accuracy"),
        "age_minus_s_max": age_minus_s,
        "start_up_s": start_ups,
        "recovery_p95_beyond_start_up_s": verdict.beyond(recovered, start_ups),
        "other_blows": dict(Counter(f"{b.kind} {b.role}" for b in deeds.dealt if b.kind != "kill" and b.hit)),
        "minutes": round(deeds.minutes, 2),
        "steps": audited.figures["learner_steps"],
        "steps_recomputed": sum(line["recomputed"] for line in verdict.step_lines(directory)),
        "wall_s": end_s - started_s,
        "commit": _commit(),
        "exit_code": exit_code,
        "findings": [*too_short(deeds, minutes), *lost, *twice, *not_once.values(), *hung, *audited.lines()][:40],
    }


def too_short(deeds: Deeds, minutes: float) -> list[str]:
    """A run that reaches its goal by itself proves less than was asked for."""
    over = deeds.minutes < minutes - 0.01
    return [f"the run was over after {deeds.minutes:.1f} of {minutes:g} minutes"] if over else []


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {"p50": verdict.quantile(values, 0.5), "p95": verdict.quantile(values, 0.95), "count": len(values)}


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, check=False)
    return done.stdout.decode().strip()


def sound(told: dict[str, Any]) -> bool:
    """Nothing is amiss."""
    zeros = ("turns_lost", "turns_twice", "batches_not_once", "promise_broken", "hung_waits")
    return told["exit_code"] == REACHED and not any(told[name] for name in zeros) and not told["findings"]


def torment(
    directory: Path,
    *,
    minutes: float,
    seed: int,
    steps: int | None,
    roles: Sequence[str],
    gap_s: float,
    overrides: tuple[str, ...],
    one_by_one: bool = False,
) -> dict[str, Any]:
    """Runs it and reports."""
    started_s = time.time()
    victim = Victim(directory, overrides=(f"run.seed={seed}", *overrides))
    witness = Witness(directory)
    blows = plan(seed, roles, gap_s=gap_s)
    if one_by_one:
        blows = (blow for blow in blows if blow.kind == "kill")
    chaos = Chaos(victim, witness, blows, roles, one_by_one=one_by_one)
    try:
        witness.start()
        exit_code = chaos.run(minutes, steps)
        if exit_code != REACHED:
            print(victim.told(), file=sys.stderr)
    finally:
        witness.close()
        victim.close()
    told = report(directory, witness, chaos.deeds, exit_code, minutes=0.0 if steps else minutes, started_s=started_s)
    deeds = {"dealt": [asdict(blow) for blow in chaos.deeds.dealt]}
    (directory / "chaos.json").write_text(json.dumps(told | deeds, indent=1) + "\n", encoding="utf-8")
    return told


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="of blows; the run's start and end are not counted")
    parser.add_argument("--seed", type=int, default=1, help="of the blows, and of the run")
    parser.add_argument("--steps", type=int, help="the run's goal; without it, whatever it comes to, and one more")
    parser.add_argument("--roles", nargs="+", default=list(ROLES), choices=ROLES)
    parser.add_argument("--gap", type=float, default=20.0, help="mean seconds between two blows")
    parser.add_argument(
        "--one-by-one", action="store_true", help="only kills, each when the role killed before is back"
    )
    parser.add_argument("--directory", type=Path, help="of the run, new; without it a temporary one")
    parser.add_argument("--set", action="append", dest="overrides", help="TABLE.KEY=VALUE, over the small recipe")
    parser.add_argument("--full", action="store_true", help="the quickstart's own sizes instead of the small ones")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as scratch:
        told = torment(
            (arguments.directory or Path(scratch) / "run").absolute(),
            minutes=arguments.minutes,
            seed=arguments.seed,
            steps=arguments.steps,
            roles=arguments.roles,
            gap_s=arguments.gap,
            one_by_one=arguments.one_by_one,
            overrides=(*(() if arguments.full else SMALL), *(arguments.overrides or ())),
        )
    if arguments.json:
        print(json.dumps(told, indent=1))
    else:
        for name, value in told.items():
            print(f"{name:18} {value}")
    return 0 if sound(told) else 1


if __name__ == "__main__":
    sys.exit(main())
