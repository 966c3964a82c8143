"""The run's truth in SQLite: who may work on what, what was finished, taken, published; where each turn lies.

Consumes    statements that the service collected for one group commit
Produces    them, durable in one transaction; before that, to whom it is told (buffer/spare.py); rows back at a restart
Waits for   the disk: `commit` is called in a worker thread; nobody else writes the file
Invariant   a commit is whole or absent; nothing is acknowledged before the commit that holds it

`journal_mode = WAL`, `synchronous = FULL`: the log is synced at every commit, so what was acknowledged survives the
loss of power as well as kill -9 (NORMAL would lose the last commits with the power). It costs one sync per commit,
and commits are grouped. Open it with any SQLite tool, also while the run goes on: `sqlite3 buffer/index.sqlite`.
`PRAGMA user_version` is the number of commits.
Times `_unix_s` are seconds since 1970. The tables and what their values mean: `TABLES` below.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from buffer.journal import NO_PAYLOAD, End, Statement
from buffer.schema import SCHEMA

TABLES = """
-- one row per key. schema, run (wire id of the run), life (starts of the buffer), next_problem (index of the next
-- problem), acked (least version loaded by the live engines), next_step (first step without a batch), phase
-- (start | train | last_version | end | done), goal (why training is over: steps | all_right | exhausted),
-- max_staleness (now in force), recipe_dials (JSON: the live dials as this start was given them), seed, steps,
-- groups_per_step, group_size, num_rollouts, meters (JSON: the buffer's cumulative figures)
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;

-- one problem and its rollouts. state is that of its ticket (buffer/tickets.py): waiting (issued) -> leased -> finished
-- (kept by RoC) -> taken (in a batch) -> released; or dropped (with drop_reason), or unused (outstanding at the goal).
-- Evaluation groups have negative numbers and no ticket: waiting -> leased -> finished (unused: the run was resumed
-- with more steps while it was evaluated)
CREATE TABLE IF NOT EXISTS groups (
  group_id INTEGER PRIMARY KEY,
  kind TEXT NOT NULL,                -- train | eval
  phase TEXT NOT NULL,               -- train: ''; eval: that of its evaluation
  problem_index INTEGER NOT NULL,    -- position in the run's problems (eval: in the held-out set)
  problem_id TEXT NOT NULL,
  problem BLOB NOT NULL,             -- msgpack array of schema.Problem's fields: id, problem, answer, source, level
  num_rollouts INTEGER NOT NULL,
  base_version INTEGER NOT NULL,     -- acked version at issue (eval: the version it runs on)
  deadline_step INTEGER NOT NULL,    -- last step that may train it; -1 for eval
  max_staleness INTEGER NOT NULL,    -- S at issue: deadline_step - base_version
  issued_unix_s REAL NOT NULL,
  first_leased_unix_s REAL,
  state TEXT NOT NULL,
  scored_unix_s REAL,                -- its last rollout was closed; from then on it waits for RoC
  decided_unix_s REAL,               -- RoC kept or dropped it
  decided_step INTEGER,              -- next step to be taken at that moment: age in flight counts up to it, age in
                                     -- the queue from it
  drop_reason TEXT NOT NULL DEFAULT '',
  timed_out INTEGER NOT NULL DEFAULT 0,  -- 1: closed by group_timeout_s
  kept TEXT NOT NULL DEFAULT '[]',   -- JSON: rollout numbers kept by RoC, ascending
  p_err TEXT NOT NULL DEFAULT '[]',  -- JSON: RoC's penalties, by position among the finished rollouts, ascending
  p_format TEXT NOT NULL DEFAULT '[]',
  step INTEGER                       -- the step whose batch holds it
);
CREATE INDEX IF NOT EXISTS groups_state ON groups (state);
CREATE INDEX IF NOT EXISTS groups_step ON groups (step);

-- state: waiting -> leased (-> waiting ...) -> finished | excluded. Where its group ended first, it stays as it was.
-- The columns from reward on are those of schema.Finish. No row before its first lease
CREATE TABLE IF NOT EXISTS rollouts (
  group_id INTEGER NOT NULL,
  rollout INTEGER NOT NULL,
  state TEXT NOT NULL,
  attempt INTEGER NOT NULL,          -- number of the latest lease, from 1; 0 before the first
  engine TEXT NOT NULL DEFAULT '',   -- name of the peer that held or holds that lease
  epoch INTEGER NOT NULL DEFAULT 0,  -- of that peer
  lease_seq INTEGER,                 -- number of that peer's request which the lease answered
  leased_unix_s REAL,
  finished_unix_s REAL,
  excluded_reason TEXT NOT NULL DEFAULT '',  -- prompt | sandbox | grading | failed; details: the engine's log
  reward REAL,
  verdict TEXT,
  answer TEXT,
  well_formed INTEGER,
  num_answers INTEGER,
  num_turns INTEGER,
  statuses TEXT,                     -- JSON: typed status of each call, in order
  num_output_tokens INTEGER,
  num_tokens INTEGER,
  end TEXT,                          -- answer | no_call | length | turns
  generate_s REAL,
  tool_s REAL,
  PRIMARY KEY (group_id, rollout)
) WITHOUT ROWID;

-- one row per durable turn; the payload lies in segments/NNNNNNNN.seg (format: buffer/segments.py)
CREATE TABLE IF NOT EXISTS turns (
  group_id INTEGER NOT NULL,
  rollout INTEGER NOT NULL,
  turn INTEGER NOT NULL,
  attempt INTEGER NOT NULL,          -- the attempt that generated it
  engine TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  segment INTEGER NOT NULL,
  offset_bytes INTEGER NOT NULL,
  length_bytes INTEGER NOT NULL,
  num_prompt_tokens INTEGER NOT NULL,
  num_output_tokens INTEGER NOT NULL,
  num_observation_tokens INTEGER NOT NULL,
  version_runs TEXT NOT NULL,        -- JSON: [[lineage, version, num_tokens], ...], covering the output
  status TEXT NOT NULL,              -- typed status of the call; '' without one
  received_unix_s REAL NOT NULL,
  PRIMARY KEY (group_id, rollout, turn)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS turns_segment ON turns (segment, offset_bytes);

-- the batch of a step, durable when taken; its groups are those with groups.step = step
CREATE TABLE IF NOT EXISTS batches (
  step INTEGER PRIMARY KEY,
  taken_unix_s REAL NOT NULL,
  acked INTEGER NOT NULL,            -- at that moment
  record BLOB NOT NULL               -- msgpack array of schema.Batch's fields
);

-- one row per name that ever said HELLO. epoch is one life of the peer and only grows
CREATE TABLE IF NOT EXISTS peers (
  name TEXT PRIMARY KEY,
  role TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  life TEXT NOT NULL,                -- random, made by the peer: a HELLO sent twice is one life
  hello_unix_s REAL NOT NULL,
  state TEXT NOT NULL,               -- alive | dead (no heartbeat) | gone (BYE) | failed
  loaded_lineage INTEGER NOT NULL DEFAULT -1,  -- engines: newest acknowledged version of this epoch
  loaded_version INTEGER NOT NULL DEFAULT -1
) WITHOUT ROWID;

-- every acknowledgement of a version by an engine
CREATE TABLE IF NOT EXISTS acknowledgements (
  name TEXT NOT NULL, epoch INTEGER NOT NULL, lineage INTEGER NOT NULL, version INTEGER NOT NULL,
  checksum INTEGER NOT NULL, pause_s REAL NOT NULL, unix_s REAL NOT NULL, acked INTEGER NOT NULL, -- acked afterwards
  PRIMARY KEY (name, epoch, lineage, version)
) WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS publications (
  lineage INTEGER NOT NULL, version INTEGER NOT NULL, unix_s REAL NOT NULL, PRIMARY KEY (lineage, version)
) WITHOUT ROWID;

-- what an acknowledgement of a publication must say (schema.WeightsManifest.checksum)
CREATE TABLE IF NOT EXISTS checksums (
  lineage INTEGER NOT NULL, version INTEGER NOT NULL, checksum INTEGER NOT NULL, PRIMARY KEY (lineage, version)
) WITHOUT ROWID;

-- version = number of steps trained into it. kept = 0: deleted by the learner, batches before it may go
CREATE TABLE IF NOT EXISTS checkpoints (version INTEGER PRIMARY KEY, unix_s REAL NOT NULL, kept INTEGER NOT NULL);

-- settings that may be turned while the run goes on (buffer/dials.py): what it began with, then every change
CREATE TABLE IF NOT EXISTS dials (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL, value REAL NOT NULL,
  step INTEGER NOT NULL,             -- first step it holds for
  unix_s REAL NOT NULL
);

CREATE TABLE IF NOT EXISTS evaluations (
  phase TEXT PRIMARY KEY,            -- start | end | step_N_life_L: the end at step N, told by buffer life L,
                                     -- of a run that was resumed with more steps
  lineage INTEGER NOT NULL, version INTEGER NOT NULL, num_problems INTEGER NOT NULL,
  started_unix_s REAL NOT NULL, ended_unix_s REAL
) WITHOUT ROWID;
"""

ENDS = "SELECT segment, offset_bytes + length_bytes FROM turns ORDER BY segment DESC, offset_bytes DESC LIMIT 1"
"""up to where payload is indexed"""
NEEDED = (
    "SELECT DISTINCT turns.segment FROM groups JOIN turns USING (group_id) "
    "WHERE (groups.state IN ('waiting', 'leased') OR groups.state = 'finished' AND groups.kind = 'train' "
    "OR groups.step >= ?)"
)
"""segments of groups being worked on, an evaluation's included, of kept groups, of batches from a step on"""
MAX_CHECKED_BYTES = 512 << 20
"""a greater file is not read through at a restart"""


class IndexFault(Exception):
    """The index cannot be used; the message names the file, what was found and what to do."""


def reading(path: Path, *, timeout_s: float = 5.0, immutable: bool = False) -> sqlite3.Connection:
    """A connection that only reads, whatever the path is called; `immutable`: nobody writes to the file.

    Raises:
        sqlite3.Error: there is no such file, or it cannot be opened.
    """
    uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if immutable else ''}"
    return sqlite3.connect(uri, uri=True, timeout=timeout_s)


class Index:
    """One connection to `index.sqlite`; used by one thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.journal: Callable[[int, End, list[Statement]], None] | None = None
        """is told each commit's number, the end of its payload and its statements before it is made"""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30.0)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(TABLES)
            found = self._db.execute("PRAGMA quick_check(1)").fetchone()[0] if self._is_small() else "ok"
        except sqlite3.Error as error:
            raise self._unusable(str(error)) from error
        if found != "ok":
            raise self._unusable(found.splitlines()[-1])
        self.number: int = self._db.execute("PRAGMA user_version").fetchone()[0]
        """of the last commit"""

    def _is_small(self) -> bool:
        return self._path.stat().st_size <= MAX_CHECKED_BYTES

    def _unusable(self, found: str) -> IndexFault:
        return IndexFault(
            f"{self._path} cannot be used ({found}): `rocstar resume RUN --rebuild-index` makes it anew from spare/ "
            "and goes on; segments/ holds every acknowledged turn"
        )

    def check(self, run: str) -> bool:
        """True when the file is new. Refuses one of another run or schema."""
        meta = self.meta()
        if not meta:
            return True
        if meta.get("schema") != SCHEMA:
            raise IndexFault(
                f"{self._path} has schema {meta.get('schema')}, this program writes {SCHEMA}: use the release that "
                "wrote it, or another run directory"
            )
        if meta.get("run") != run:
            raise IndexFault(
                f"{self._path} belongs to run {meta.get('run')!r}, not {run!r}: choose another run.directory, or "
                "resume that run"
            )
        return False

    def meta(self) -> dict[str, Any]:
        return dict(self._db.execute("SELECT key, value FROM meta").fetchall())

    def rows(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._db.execute(sql, parameters).fetchall()

    def commit(self, statements: Iterable[Statement], end: End = NO_PAYLOAD) -> None:
        """Run the statements in one transaction, synced when this returns; consecutive equal ones go as a batch."""
        statements, number = list(statements), self.number + 1
        if self.journal is not None:
            self.journal(number, end, statements)
        self._db.execute("BEGIN IMMEDIATE")
        try:
            pending: list[tuple[Any, ...]] = []
            last = ""
            for sql, parameters in statements:
                if sql != last and pending:
                    self._db.executemany(last, pending)
                    pending = []
                last = sql
                pending.append(parameters)
            if pending:
                self._db.executemany(last, pending)
            self._db.execute(f"PRAGMA user_version = {number}")
            self._db.execute("COMMIT")
            self.number = number
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        self._db.close()


def put_meta(key: str, value: int | float | str) -> Statement:
    return (
        "INSERT INTO meta (key, value) VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
        (key, value),
    )
