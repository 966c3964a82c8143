"""What an episode works with, in tests: a real chat, a scripted engine with real tokens, Python without isolation."""

import asyncio
import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout
from functools import cache

import numpy as np

from actors.chat import Chat, ChatSettings
from actors.engine import Generation
from actors.settings import RolloutSettings
from buffer.schema import Problem, Turn, VersionRun
from launch.tiny import TinySettings, train_tokenizer
from sandbox.api import Result, Status, Verdict

TOOL = ChatSettings().tool_name
PROBLEM = Problem(id="p", problem="What is 6 * 7?", answer="42")
SETTINGS = RolloutSettings(max_turns=3, max_length=2000, max_new_tokens=600)


@cache
def chat() -> Chat:
    texts = [f"user\nWhat is {n} + 1?<tool_call>" + json.dumps({"name": TOOL}) for n in range(50)]
    return Chat(train_tokenizer(TinySettings(vocabulary=400), texts), ChatSettings())


def call(code: str) -> str:
    return f"go</reason><tool_call>{json.dumps({'name': TOOL, 'arguments': {'code': code, 'input': ''}})}</tool_call>"


def answer(text: str) -> str:
    return f"so</reason><answer>\\boxed{{{text}}}</answer>"


class Script:
    """Says what it is told to, turn by turn, within the limits it is given; remembers the contexts it saw."""

    def __init__(self, *turns: str | Exception) -> None:
        self._turns = list(turns)
        self.contexts: list[list[int]] = []
        self.limits: list[int] = []

    async def generate(
        self, context: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int], temperature: float | None = None
    ) -> Generation:
        self.contexts.append(list(context))
        self.limits.append(max_new_tokens)
        turn = self._turns.pop(0)
        if isinstance(turn, Exception):
            raise turn
        ids = np.asarray(chat().turn_ids(turn)[:max_new_tokens], dtype=np.int32)
        return Generation(
            token_ids=ids,
            logprobs=np.full(len(ids), -0.5, dtype=np.float32),
            version_runs=(VersionRun(lineage=1, version=4, num_tokens=len(ids)),),
            stopped=ids[-1] in stop_ids,
            cached_tokens=0,
            generate_s=0.25,
        )


class Python:
    """Runs code here, without isolation; `status` makes every call end that way instead."""

    def __init__(
        self, status: Status = Status.OK, verdict: Verdict | None = None, error: Exception | None = None
    ) -> None:
        self._status, self._verdict, self._error = status, verdict, error
        self.ran: list[str] = []
        self.graded: list[tuple[str, str]] = []

    async def run(self, code: str, input: str = "", *, priority: int = 0) -> Result:
        self.ran.append(code)
        if self._status is not Status.OK:
            return Result(id="x", status=self._status, exception="Gone: no node")
        printed = io.StringIO()
        with redirect_stdout(printed):
            exec(code, {})
        return Result(id="x", status=Status.OK, stdout=printed.getvalue(), queue_s=0.5, run_s=0.25)

    async def check(self, answer: str, gold: str) -> Verdict:
        self.graded.append((answer, gold))
        if self._error:
            raise self._error
        return self._verdict or (Verdict.RIGHT if answer == gold else Verdict.WRONG)


class Store:
    """Keeps turns; each push may be held up."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.open = asyncio.Event()
        self.open.set()
        self.error: Exception | None = None

    async def push(self, turn: Turn) -> None:
        await self.open.wait()
        if self.error:
            raise self.error
        self.turns.append(turn)
