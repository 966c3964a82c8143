"""One rollout: the model generates, its calls are run, what came back is shown to it, until it ends; then it is graded.

Consumes    a lease, perhaps with turns that are durable already; an engine, a chat, a sandbox
Produces    each finished turn, pushed in order; at last a `Finish`, or `InfrastructureFailed`
Waits for   the engine, the sandbox, and, one turn behind, the buffer's word that a turn is durable
Invariant   a durable turn is never generated or executed again; at most one turn is not durable while the next is
            generated; the score is made after all turns are durable; no failure of ours is scored as the model's

No sockets, no Ray, no clock but durations: what it works with is handed to it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from actors.chat import Malformed, Parsed, ToolCall
from actors.engine import Generation
from actors.settings import RolloutSettings
from buffer.schema import ExclusionReason, Finish, Lease, TokenIds, Turn
from sandbox.api import Result, Status, Verdict
from sandbox.client import CheckFailed

__all__ = ["Chats", "Episode", "Generates", "InfrastructureFailed", "Runs"]

OBSERVATION_CHARS = 8192
"""Of an observation's text, at most this is recorded; its tokens are recorded whole."""
NO_TOKENS: TokenIds = np.empty(0, dtype=np.int32)


class Generates(Protocol):
    """The part of an engine that an episode uses."""

    async def generate(
        self, context: Sequence[int], *, max_new_tokens: int, stop_ids: Sequence[int], temperature: float | None = None
    ) -> Generation: ...


class Chats(Protocol):
    """The part of a chat that an episode uses."""

    stop_ids: tuple[int, ...]

    def prompt_ids(self, problem: str) -> list[int]: ...
    def observation_ids(self, text: str) -> list[int]: ...
    def parse(self, output_ids: Sequence[int]) -> Parsed: ...


class Runs(Protocol):
    """The part of a sandbox that an episode uses; both calls retry by themselves."""

    async def run(self, code: str, input: str = "", *, priority: int = 0) -> Result: ...
    async def check(self, answer: str, gold: str) -> Verdict: ...


class InfrastructureFailed(Exception):
    """The rollout cannot be finished, and that says nothing about the model."""

    def __init__(self, reason: ExclusionReason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: ExclusionReason = reason


@dataclass(kw_only=True, slots=True)
class _Response:
    """What a turn is answered with; no tokens when the rollout ends with it."""

    end: str = ""
    code: str = ""
    status: str = ""
    text: str = ""
    ids: TokenIds = field(default_factory=lambda: NO_TOKENS)
    queue_s: float = 0.0
    run_s: float = 0.0
    wall_s: float = 0.0


class Episode:
    """Use `await Episode(lease, ...).run()` once."""

    def __init__(
        self,
        lease: Lease,
        *,
        engine: Generates,
        chat: Chats,
        sandbox: Runs,
        push: Callable[[Turn], Awaitable[None]],
        settings: RolloutSettings,
        temperature: float | None = None,
    ) -> None:
        """`push` returns when the turn is durable; `temperature` in place of that of `settings`."""
        self._lease = lease
        self._engine, self._chat, self._sandbox = engine, chat, sandbox
        self._push_durably = push
        self._settings = settings
        self._temperature = temperature
        self._pushing: asyncio.Task[None] | None = None
        self._context: list[int] = []
        self._parsed: list[Parsed] = []
        self._statuses: list[str] = []
        self._num_output_tokens = 0
        self._generate_s = 0.0
        self._tool_s = 0.0
        self._end = self._replay()

    @property
    def context_tokens(self) -> int:
        """Prompt, outputs and observations so far."""
        return len(self._context)

    async def run(self) -> Finish:
        """The rollout's outcome; whatever `push` and the engine raise passes through.

        Raises:
            InfrastructureFailed: what was generated is durable, but it can't go on.
        """
        try:
            self._check_prompt()
            while not self._end:
                self._end = await self._turn()
            await self._pushed()
            return await self._score(self._end)
        except InfrastructureFailed:
            await self._pushed()
            raise
        finally:
            if self._pushing is not None:
                self._pushing.cancel()

    def _check_prompt(self) -> None:
        if not self._parsed and len(self._context) >= self._settings.max_length:
            raise InfrastructureFailed(
                "prompt",
                f"problem {self._lease.problem.id} has {len(self._context)} tokens, which leaves none of "
                f"rollout.max_length = {self._settings.max_length} for the model",
            )

    def _replay(self) -> str:
        """Take over what is durable; says how the rollout ended if it did."""
        turns = self._lease.turns
        if not turns:
            self._context = self._chat.prompt_ids(self._lease.problem.problem)
            return ""
        for turn in turns:
            self._context += [*turn.prompt_ids.tolist(), *turn.output_ids.tolist(), *turn.observation_ids.tolist()]
            self._account(self._chat.parse(turn.output_ids.tolist()), turn)
        if len(turns[-1].observation_ids):
            return ""
        return self._end_of(self._parsed[-1], turns[-1].turn) or "length"

    async def _turn(self) -> str:
        """One generation and what it is answered with; says how the rollout ended if it did."""
        lease, settings, number = self._lease, self._settings, len(self._parsed)
        generation = await self._engine.generate(
            self._context,
            max_new_tokens=min(settings.max_new_tokens, settings.max_length - len(self._context)),
            stop_ids=self._chat.stop_ids,
            temperature=self._temperature,
        )
        output = generation.token_ids.tolist()
        parsed = self._chat.parse(output)
        response = await self._respond(parsed, number, len(self._context) + len(output))
        turn = Turn(
            group=lease.group,
            rollout=lease.rollout,
            attempt=lease.attempt,
            turn=number,
            prompt_ids=NO_TOKENS if number else np.asarray(self._context, dtype=np.int32),
            output_ids=generation.token_ids,
            logprobs=generation.logprobs,
            version_runs=generation.version_runs,
            observation_ids=response.ids,
            code=response.code,
            status=response.status,
            observation=_shortened(response.text),
            generate_s=generation.generate_s,
            tool_queue_s=response.queue_s,
            tool_run_s=response.run_s,
        )
        self._context += output
        self._context += response.ids.tolist()
        self._account(parsed, turn)
        self._tool_s += response.wall_s - response.queue_s - response.run_s  # the way there and back
        await self._push(turn)
        return response.end

    def _end_of(self, parsed: Parsed, number: int) -> str:
        """How a rollout ends with this turn; "" when its call is to be answered."""
        if not parsed.ended:
            return "length"
        if parsed.call is None:
            return "answer" if parsed.num_answers else "no_call"
        return "turns" if number + 1 >= self._settings.max_turns else ""

    async def _respond(self, parsed: Parsed, number: int, num_tokens: int) -> _Response:
        end = self._end_of(parsed, number)
        if isinstance(parsed.call, Malformed):
            response = _Response(end=end, status=Status.MALFORMED.value, text="" if end else parsed.call.text)
        elif end or parsed.call is None:
            return _Response(end=end)
        else:
            response = await self._run(parsed.call)
        if response.end:
            return response
        ids = self._chat.observation_ids(response.text)
        if num_tokens + len(ids) >= self._settings.max_length:
            response.end, response.text = "length", ""  # the model never sees it
        else:
            response.ids = np.asarray(ids, dtype=np.int32)
        return response

    async def _run(self, call: ToolCall) -> _Response:
        started_s = time.monotonic()
        result = await self._sandbox.run(call.code, call.input, priority=-self._lease.deadline)
        if result.infra:
            raise InfrastructureFailed("sandbox", f"{result.status} {result.exception}".strip())
        return _Response(
            code=call.code,
            status=result.status.value,
            text=result.to_text(),
            queue_s=result.queue_s,
            run_s=result.run_s,
            wall_s=time.monotonic() - started_s,
        )

    def _account(self, parsed: Parsed, turn: Turn) -> None:
        self._parsed.append(parsed)
        if turn.status:
            self._statuses.append(turn.status)
        self._num_output_tokens += len(turn.output_ids)
        self._generate_s += turn.generate_s
        self._tool_s += turn.tool_queue_s + turn.tool_run_s

    async def _push(self, turn: Turn) -> None:
        """Start pushing; the next turn's generation does not wait for it, the next push does."""
        await self._pushed()
        self._pushing = asyncio.ensure_future(self._push_durably(turn))

    async def _pushed(self) -> None:
        if self._pushing is not None:
            await self._pushing

    async def _score(self, end: str) -> Finish:
        lease = self._lease
        answers = [p.answer for p in self._parsed if p.answer_well_formed and p.answer is not None]
        verdict, answer = "none", ""
        if answers and end in ("answer", "no_call"):  # a rollout that was cut off is not graded: it has no final answer
            answer = answers[-1]
            verdict = await self._grade(answer)
        return Finish(
            group=lease.group,
            rollout=lease.rollout,
            attempt=lease.attempt,
            reward=1.0 if verdict == Verdict.RIGHT.value else 0.0,
            verdict=verdict,
            answer=answer,
            well_formed=bool(answers),
            num_answers=sum(p.num_answers for p in self._parsed),
            num_turns=len(self._parsed),
            statuses=tuple(self._statuses),
            num_output_tokens=self._num_output_tokens,
            num_tokens=len(self._context),
            end=end,
            generate_s=self._generate_s,
            tool_s=self._tool_s,
        )

    async def _grade(self, answer: str) -> str:
        try:
            return (await self._sandbox.check(answer, self._lease.problem.answer)).value
        except CheckFailed as error:
            raise InfrastructureFailed("grading", str(error)) from error


def _shortened(text: str) -> str:
    if len(text) <= OBSERVATION_CHARS:
        return text
    return text[: OBSERVATION_CHARS // 2] + "\n...\n" + text[-OBSERVATION_CHARS // 2 :]
