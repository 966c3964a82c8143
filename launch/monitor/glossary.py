"""Every figure of the screen in one entry: what it is, what is good, what to turn.

Produces    lines for `?`
Waits for   nothing: pure
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

WIDTH = 78
INDENT = " " * 4


@dataclass(frozen=True, slots=True)
class Entry:
    """A figure, or figures that belong together."""

    name: str
    what: str
    good: str = ""
    turn: str = ""


KEYS = (
    "1 engines   2 sandbox queue   3 groups by age   4 a learner step   5 weights",
    "6 a trajectory   ? help   j JSON   Esc back to the screen   q quit",
    "n and p: next and previous trajectory (6) or step (4); N and P: group (6)",
    "arrows, Page Up, Page Down, Home, End: scroll",
)
PARTS: tuple[tuple[str, tuple[Entry, ...]], ...] = (
    (
        "HEAD",
        (
            Entry(
                "state", "running, evaluating, done; how it ended; stopped: nobody drives it", "", "rocstar resume RUN"
            ),
            Entry("step, version", "steps whose batch is on record; version that all live engines have"),
            Entry("eta", "time to the goal at the pace of the window"),
            Entry("s/step", "wall time per learner step", "what the slowest stage allows", "the first FIX"),
            Entry("window", "what all rates and shares are over", "", "--window SECONDS"),
            Entry("VERDICT", "the stage that limits; unclear, with the reason, when the evidence is", "balanced"),
            Entry("FIX", "a dial, its value and a better one, and the rate to expect; best first"),
        ),
    ),
    (
        "FLOW",
        (
            Entry("groups/min trained", "groups taken into batches: the throughput", "as high as the least cap"),
            Entry(
                "groups/min decided",
                "those that RoC kept or dropped",
                "near what is trained",
                "easier or harder problems",
            ),
            Entry(
                "cap",
                "groups/min that the stage could do if nothing else held it up",
                "all alike",
                "the least one's dial",
            ),
            Entry("% and bar", "share of the stage's capacity in use", "below 85%, but for the limit"),
            Entry(
                "engines",
                "speed against the best of the measured curve; - while that rises",
                "",
                "rollout.engines, weights.kv",
            ),
            Entry(
                "sandbox",
                "share of time in which a call waits for each worker",
                "below 50%",
                "sandbox.workers, sandbox.wall_s",
            ),
            Entry("filter, buffer", "share of time at work", "below 50%", "a faster disk for the buffer"),
            Entry(
                "learner",
                "share of time not waiting, less what it lacked a core",
                "",
                "learner.ranks, micro_batch_tokens",
            ),
            Entry(
                "swap",
                "share of a step in which a version is on its way",
                "below 20%",
                "weights.bucket_mib, weights.kv",
            ),
            Entry("cores", "share of a host's cores in use", "below 85%", "another host, fewer threads"),
            Entry(
                "slots, kv",
                "engines that take no rollout more: slots used up, or the KV cache",
                "",
                "rollout.concurrency, kv_cache_mib",
            ),
            Entry("tickets", "active ones against the bound (S+1) P", "", "staleness.max_staleness"),
        ),
    ),
    (
        "ROLES",
        (
            Entry("busy #", "share of its clock at work"),
            Entry("starved .", "waits for input", "learner: below 10%", "whatever comes before it"),
            Entry("blocked x", "waits for room downstream, or for the disk", "below 20%", "whatever comes after it"),
            Entry("sync =", "exchanges weights", "below 5%", "weights.bucket_mib, weights.kv"),
            Entry("down !", "starts or recovers", "0", "its log in RUN/logs"),
            Entry("cores", "CPU seconds of its processes per second", "", "rollout.cpu_threads"),
        ),
    ),
    (
        "TICKETS, STALENESS",
        (
            Entry("waiting", "tickets whose group no engine has begun", "a few", "engines if many"),
            Entry("leased", "groups in the hands of engines"),
            Entry("finished", "groups that wait for a batch", "less than P", "a lower S if many"),
            Entry("taken", "groups of steps whose version engines have not loaded yet", "at most P"),
            Entry(
                "age",
                "learner steps between sampling a token and training it",
                "at most S, always",
                "staleness.max_staleness",
            ),
            Entry(
                "in flight, in queue",
                "age gained until RoC decided, and after it",
                "in queue near 0",
                "shorter rollouts; a lower S",
            ),
            Entry("turns of several versions", "turns during which a version was loaded", "any"),
        ),
    ),
    (
        "USEFUL",
        (
            Entry("% of groups", "groups that RoC kept", "above 70%", "problems of fitting difficulty"),
            Entry(
                "dropped", "by reason: all_right and all_wrong teach nothing", "below 30%", "harder or easier problems"
            ),
            Entry("tokens/s generated, trained", "sampled; in batches", "trained near G/2G of generated"),
            Entry(
                "tools %", "share of a rollout's life in which it waits for the sandbox", "below 30%", "sandbox.workers"
            ),
            Entry("reward", "mean of scored rollouts", "rises"),
            Entry("failed calls", "calls with an error, infrastructure apart", "falls", "roc.mode, roc.epsilon"),
        ),
    ),
    (
        "LEARNER STEP",
        (
            Entry("wait", "for a batch", "near 0 when engines do not limit", "engines, S"),
            Entry(
                "fetch, train, checkpoint, publish",
                "where the rest of a step goes",
                "mostly train",
                "learner.checkpoint_every",
            ),
            Entry("loss, grad_norm, lr", "of the newest step", "grad_norm steady", "learner.lr"),
            Entry(
                "ratio_mean", "mean ratio of the policy to the engine's", "0.98 to 1.02", "loss.correction; a lower S"
            ),
            Entry(
                "clipped, capped_share",
                "tokens whose ratio was clipped, whose weight was capped",
                "below 5%",
                "loss.tis_cap; a lower S",
            ),
            Entry("ess", "effective sample size, as a share", "above 0.9", "a lower S"),
            Entry("entropy", "nats per token", "does not collapse to 0", "learner.lr, harder problems"),
            Entry("publish, receive", "seconds to publish a version; to receive it, while generating"),
            Entry(
                "pause",
                "an engine does not generate while it loads a version",
                "below 5% of its time",
                "weights.kv, bucket_mib",
            ),
            Entry(
                "publish lag",
                "from a publication until all live engines have it",
                "less than a step",
                "the slowest engine",
            ),
        ),
    ),
    (
        "TREND, ALERTS",
        (
            Entry(
                "TREND", "groups/min, reward, entropy, length of a rollout, age: first -> last of the last half hour"
            ),
            Entry("ALERTS", "info: to know; warn: to look at; error: something failed", "none"),
            Entry("DIAL", "a setting turned while the run went on", "", "rocstar set RUN TABLE.KEY=VALUE"),
        ),
    ),
    (
        "TRAJECTORY",
        (
            Entry("penalties", "RoC's of a right rollout: share of failed calls (0.5 without a call), form", "0"),
            Entry("version (tokens)", "which version sampled how many tokens of the turn, in their order"),
            Entry("lease", "how often the rollout was given to an engine", "1", "logs of the engines"),
        ),
    ),
)


def help_lines() -> list[str]:
    """Keys, then every figure."""
    out = ["---- KEYS", *KEYS]
    for part, entries in PARTS:
        out += ["", f"---- {part}"]
        for entry in entries:
            out += textwrap.wrap(_said(entry), WIDTH, subsequent_indent=INDENT)
    return out


def _said(entry: Entry) -> str:
    good = f"; good: {entry.good}" if entry.good else ""
    turn = f"; turn: {entry.turn}" if entry.turn else ""
    return f"{entry.name}: {entry.what}{good}{turn}"
