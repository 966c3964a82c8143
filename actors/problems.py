"""Problems: where they come from, and a stream of them with a position.

Consumes    `ProblemSettings`, a seed
Produces    `Problem`s: `ProblemStream.at(index)` for training, `ProblemStream.heldout` for evaluation
Waits for   nothing (a Hugging Face data set is downloaded when the stream is made)
Invariant   `at(index)` depends on settings, seed and index alone, so a position is all that a restart needs;
            no training problem has the text of a held-out one; the held-out problems do not depend on the seed
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import lru_cache
from random import Random
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from buffer.schema import Problem

__all__ = ["FamilySettings", "Problem", "ProblemError", "ProblemSettings", "ProblemStream", "draw"]

MAX_REDRAWS = 1000
"""Draws for one index before a family counts as having no text outside the held-out ones."""

FINGERPRINTED = 16


class ProblemError(ValueError):
    """A source that cannot be read, or cannot give what the settings ask of it."""


class FamilySettings(BaseModel):
    """One reasoning-gym family, e.g. `{name = "products", options = {max_digits = 2}}`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: str
    options: dict[str, Any] = Field(default_factory=dict)
    """The family's own settings. With `size`, items are drawn from that many; without, from 2^31."""
    template: str | None = None
    """Text made from the item's metadata, e.g. "{expression}"; None is the item's own question."""


class ProblemSettings(BaseModel):
    """The `[problems]` table of a recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    source: Literal["reasoning_gym", "jsonl", "parquet", "huggingface"] = "reasoning_gym"
    families: tuple[FamilySettings, ...] = ()
    """reasoning_gym: the families, taken in turn."""
    path: str | None = None
    """jsonl, parquet: a file (parquet: or a folder of shards); huggingface: "owner/name"."""
    subset: str | None = None
    """huggingface: the configuration, where the data set has several."""
    split: str = "train"
    """huggingface: the split."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Names of our fields in the source, e.g. {problem = "question"}."""
    num_heldout: int = Field(default=512, ge=0)
    """Problems kept for evaluation, never trained on."""
    epochs: int | None = Field(default=None, ge=1)
    """Passes over a finite source; None goes on for ever."""

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> "ProblemSettings":
        if self.source == "reasoning_gym":
            if not self.families:
                raise ValueError('problems.families is empty: name at least one, e.g. families = [{name = "products"}]')
            if self.path is not None or self.epochs is not None:
                raise ValueError("problems.path and problems.epochs belong to finite sources: remove them")
        elif self.path is None:
            raise ValueError(f'problems.path is missing: problems.source = "{self.source}" reads from it')
        elif self.families:
            raise ValueError(f'problems.families belongs to "reasoning_gym", problems.source is "{self.source}"')
        if unknown := sorted(set(self.columns) - {"id", "problem", "answer", "source", "level"}):
            raise ValueError(f"problems.columns names {unknown}: a problem has id, problem, answer, source, level")
        return self


class ProblemStream:
    """The problems of one run in their order; `index` is the resumable position.

    Example:
        stream = ProblemStream(settings, seed=1)
        while not stream.exhausted(index):
            problem, index = stream.at(index), index + 1
    """

    def __init__(self, settings: ProblemSettings, seed: int) -> None:
        self._source: _Families | _Rows
        if settings.source == "reasoning_gym":
            self._source = _Families(settings, seed)
        else:
            from actors.problem_files import read_rows  # here: pyarrow is a second of import

            self._source = _Rows(settings, seed, read_rows(settings))

    @property
    def heldout(self) -> tuple[Problem, ...]:
        """`num_heldout` problems of distinct texts, the same for every seed."""
        return self._source.heldout

    @property
    def num_problems(self) -> int | None:
        """Training problems in an epoch; None when the source is procedural and has no end."""
        return self._source.num_problems

    def at(self, index: int) -> Problem:
        """The problem at this position.

        Raises:
            IndexError: the position lies behind the last epoch.
        """
        if index < 0 or self.exhausted(index):
            raise IndexError(f"problem {index} lies outside the source's {self._source.end} problems")
        return self._source.at(index)

    def item_at(self, index: int) -> Mapping[str, Any]:
        """The reasoning-gym item (question, answer, metadata) behind `at(index)`; demonstrations are made from it."""
        if isinstance(self._source, _Rows):
            raise ProblemError("only reasoning-gym families have items that demonstrations can be made from")
        return self._source.item_at(index)

    def fingerprint(self) -> str:
        """Of the content: all problems of a finite source in their order; of a procedural one, the held-out problems
        and the first FINGERPRINTED of training.
        """
        digest = hashlib.sha256()
        for problem in self._source.known():
            digest.update(repr(astuple(problem)).encode())
        return f"sha256:{digest.hexdigest()}"

    def exhausted(self, index: int) -> bool:
        """True when the epochs of the recipe end before this position."""
        return self._source.end is not None and index >= self._source.end


def draw(*key: object) -> int:
    """63 bits that depend on the key alone, on any host."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, key)).encode()).digest()[:8], "big") >> 1


class _Families:
    """Procedural problems: the families in turn, each item drawn by (seed, index)."""

    num_problems: int | None = None
    end: int | None = None

    def __init__(self, settings: ProblemSettings, seed: int) -> None:
        self._families = settings.families
        self._datasets = [_dataset(family) for family in settings.families]
        self._seed = seed
        self._excluded: set[str] = set()
        heldout = []
        for number in range(settings.num_heldout):
            heldout.append(self._draw("heldout", number)[0])
            self._excluded.add(heldout[-1].problem)
        self.heldout = tuple(heldout)

    def at(self, index: int) -> Problem:
        return self._draw(self._seed, index)[0]

    def item_at(self, index: int) -> Mapping[str, Any]:
        return self._draw(self._seed, index)[1]

    def known(self) -> Iterable[Problem]:
        return (*self.heldout, *map(self.at, range(FINGERPRINTED)))

    def _draw(self, salt: object, index: int) -> tuple[Problem, Mapping[str, Any]]:
        which = index % len(self._families)
        family, dataset = self._families[which], self._datasets[which]
        size = family.options.get("size", 2**31)
        for attempt in range(MAX_REDRAWS):
            item = _item(family, dataset, draw(salt, index, attempt) % size)
            text = _text(family, item)
            if text not in self._excluded:
                name = f"{family.name}-{salt}-{index}"
                return Problem(id=name, problem=text, answer=str(item["answer"]), source=family.name), item
        raise ProblemError(
            f"problems.families: {family.name} gave no text outside the held-out ones in {MAX_REDRAWS} draws: "
            f"lower problems.num_heldout, or widen the family's options {family.options}"
        )


class _Rows:
    """Problems of a finite source, reshuffled each epoch by (seed, epoch)."""

    def __init__(self, settings: ProblemSettings, seed: int, rows: Sequence[Problem]) -> None:
        first = {row.problem: row for row in reversed(rows)}
        order = sorted(first, key=lambda text: draw("heldout", text))
        held = set(order[: settings.num_heldout])
        self.heldout = tuple(first[text] for text in order[: settings.num_heldout])
        self._train = tuple(row for row in rows if row.problem not in held)
        if len(held) < settings.num_heldout or not self._train:
            raise ProblemError(
                f"{settings.path} has {len(rows)} problems ({len(first)} distinct texts); problems.num_heldout = "
                f"{settings.num_heldout} leaves {len(self._train)} to train on: lower it"
            )
        self.num_problems: int | None = len(self._train)
        self.end = None if settings.epochs is None else settings.epochs * len(self._train)
        self._order = lru_cache(maxsize=2)(lambda epoch: _permutation(seed, epoch, len(self._train)))

    def at(self, index: int) -> Problem:
        epoch, place = divmod(index, len(self._train))
        return self._train[self._order(epoch)[place]]

    def known(self) -> Iterable[Problem]:
        return (*self.heldout, *self._train)


def _permutation(seed: int, epoch: int, count: int) -> Sequence[int]:
    random = Random(draw("epoch", seed, epoch)).random  # Python promises this sequence, not that of `shuffle`
    keys = [random() for _ in range(count)]
    return sorted(range(count), key=keys.__getitem__)


def _dataset(family: FamilySettings) -> Any:
    import difflib

    import reasoning_gym.factory  # here: it loads every family, two seconds

    known = list(reasoning_gym.factory.DATASETS)
    if family.name not in known:
        near = difflib.get_close_matches(family.name, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else f"there are {len(known)}, e.g. products, chain_sum, gcd"
        raise ProblemError(f'problems.families: reasoning-gym has no "{family.name}": {hint}')
    try:
        return reasoning_gym.factory.create_dataset(family.name, **{"seed": 0, **family.options})
    except (TypeError, ValueError, AssertionError) as error:
        raise ProblemError(f"problems.families: {family.name} refuses options {family.options}: {error}") from error


def _item(family: FamilySettings, dataset: Any, index: int) -> Mapping[str, Any]:
    try:
        return dataset[index]
    except IndexError as error:
        raise ProblemError(
            f"problems.families: {family.name} has a fixed number of items and no number {index}: set options.size"
        ) from error


def _text(family: FamilySettings, item: Mapping[str, Any]) -> str:
    if family.template is None:
        return str(item["question"])
    try:
        return family.template.format_map({**item["metadata"], "question": item["question"]})
    except (KeyError, IndexError, ValueError) as error:
        raise ProblemError(
            f'problems.families: template "{family.template}" of {family.name} cannot be filled ({error!r}); '
            f"its items have {sorted(item['metadata'])}"
        ) from error
