"""Finite sources of problems: a JSONL file, Parquet files, a Hugging Face data set.

Consumes    `ProblemSettings`
Produces    `Problem`s in file order
Waits for   the download of a Hugging Face data set (cached by huggingface_hub)
Invariant   ids are unique; every fault names the file and the line or row
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from actors.problems import Problem, ProblemError, ProblemSettings


def read_rows(settings: ProblemSettings) -> list[Problem]:
    """All problems of a finite source.

    Raises:
        ProblemError: no such file, nothing in it, a malformed line, a missing field, an id used twice.
    """
    path = settings.path
    assert path is not None
    if settings.source == "jsonl":
        located = _jsonl(Path(path))
    elif settings.source == "parquet":
        located = _parquet(_shards(Path(path)))
    else:
        located = _parquet(_download(settings))
    rows: list[Problem] = []
    seen: dict[str, str] = {}
    for place, record in located:
        row = _problem(place, record, settings)
        if row.id in seen:
            raise ProblemError(f'{place}: id "{row.id}" is used already at {seen[row.id]}: ids must be unique')
        seen[row.id] = place
        rows.append(row)
    if not rows:
        raise ProblemError(f"{path} holds no problem")
    return rows


def _problem(place: str, record: Mapping[str, Any], settings: ProblemSettings) -> Problem:
    values: dict[str, str] = {}
    for field in ("id", "problem", "answer", "source", "level"):
        column = settings.columns.get(field, field)
        value = record.get(column)
        required = field in ("problem", "answer") or (field == "id" and settings.source != "huggingface")
        if value is None and required:
            raise ProblemError(f'{place}: field "{column}" is missing; the fields are {sorted(record)}')
        if isinstance(value, (dict, list, bool)):
            raise ProblemError(f'{place}: field "{column}" is {value!r}: it must be text or a number')
        values[field] = "" if value is None else str(value)
    if not values["problem"].strip() or not values["answer"].strip():
        raise ProblemError(f"{place}: problem and answer must not be empty")
    values["id"] = values["id"] or place.rpartition("/")[2]
    values["source"] = values["source"] or str(settings.path)
    return Problem(**values)


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ProblemError(f"{path}: cannot be read: {error.strerror}") from error
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ProblemError(f"{place}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise ProblemError(f"{place}: a problem is a JSON object with id, problem, answer; this is {record!r:.60}")
        yield place, record


def _parquet(paths: Iterable[Path]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for path in paths:
        try:
            table = pyarrow.parquet.read_table(path)
        except (OSError, pyarrow.ArrowException) as error:
            raise ProblemError(f"{path}: not a Parquet file that can be read: {error}") from error
        for number, record in enumerate(table.to_pylist(), start=1):
            yield f"{path}:{number}", record


def _shards(path: Path) -> list[Path]:
    if not path.exists():
        raise ProblemError(f"{path}: no such file or folder")
    shards = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not shards:
        raise ProblemError(f"{path}: no *.parquet in this folder")
    return shards


def _download(settings: ProblemSettings) -> list[Path]:
    import httpx
    import huggingface_hub  # here: other sources need no network client

    assert settings.path is not None
    try:
        names = huggingface_hub.HfApi().list_repo_files(settings.path, repo_type="dataset")
        chosen = split_files(names, settings.subset, settings.split)
        if not chosen:
            raise ProblemError(
                f"{settings.path}: no Parquet file of split {settings.split!r}"
                + (f" in {settings.subset!r}" if settings.subset else "")
                + f"; its files are {', '.join(names[:20])}"
            )
        return [Path(huggingface_hub.hf_hub_download(settings.path, name, repo_type="dataset")) for name in chosen]
    except (OSError, ValueError, httpx.HTTPError, huggingface_hub.errors.HfHubHTTPError) as error:
        if isinstance(error, ProblemError):
            raise
        raise ProblemError(f"{settings.path}: this Hugging Face data set cannot be had: {error}") from error


def split_files(names: Iterable[str], subset: str | None, split: str) -> list[str]:
    """The Parquet files of one split, e.g. `data/train-00000-of-00001.parquet` of split "train"."""
    chosen = []
    for name in names:
        folder, _, file = name.rpartition("/")
        of_split = file.split("-")[0].removesuffix(".parquet") == split or folder.split("/")[-1] == split
        if file.endswith(".parquet") and of_split and (subset is None or subset in folder.split("/")):
            chosen.append(name)
    return sorted(chosen)
