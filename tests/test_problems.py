"""Problems: the stream's law, its sources, and what each bad source is told."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.problem_files import split_files
from actors.problems import FamilySettings, ProblemError, ProblemSettings, ProblemStream

FAMILIES = (
    FamilySettings(name="products", options={"max_digits": 2}),
    FamilySettings(name="count_bits", options={"max_n": 400}, template="{number}"),
)
PROCEDURAL = ProblemSettings(families=FAMILIES, num_heldout=100)
STREAM = ProblemStream(PROCEDURAL, seed=1)


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def numbered(count: int) -> list[dict[str, str]]:
    return [{"id": f"p{n}", "problem": f"{n} + 1 =", "answer": str(n + 1)} for n in range(count)]


def of_file(path: Path, **changes: Any) -> ProblemSettings:
    return ProblemSettings(**{"source": "jsonl", "path": str(path), "num_heldout": 2, **changes})


@settings(deadline=None)  # a busy machine is no failure
@given(index=st.integers(0, 2**40))
def test_a_position_gives_the_same_problem_in_any_process_and_order(index: int) -> None:
    assert STREAM.at(index) == ProblemStream(PROCEDURAL, seed=1).at(index)


def test_procedural_training_never_meets_a_heldout_text_whatever_the_seed() -> None:
    heldout = {problem.problem for problem in STREAM.heldout}
    assert len(heldout) == len(STREAM.heldout) == 100
    for seed in (1, 2):
        stream = ProblemStream(PROCEDURAL, seed)
        assert stream.heldout == STREAM.heldout
        assert heldout.isdisjoint({stream.at(index).problem for index in range(2000)})


def test_seeds_give_different_problems_and_ids_are_unique() -> None:
    first = [STREAM.at(index) for index in range(200)]
    other = ProblemStream(PROCEDURAL, seed=2)
    assert len({problem.id for problem in first}) == 200
    same = sum(STREAM.at(index).problem == other.at(index).problem for index in range(200))
    assert same < 20  # chance repeats of small numbers, not a shifted copy
    shifted = {problem.problem for problem in first[::2]} & {other.at(index).problem for index in range(0, 200, 2)}
    assert len(shifted) < 20


def test_families_come_in_turn_and_a_template_replaces_the_question() -> None:
    product, bits = STREAM.at(6), STREAM.at(7)
    assert (product.source, bits.source) == ("products", "count_bits")
    assert bits.problem.isdigit()
    assert bits.answer == str(int(bits.problem).bit_count())
    assert STREAM.item_at(7)["metadata"]["number"] == int(bits.problem)
    assert STREAM.num_problems is None
    assert not STREAM.exhausted(2**60)


def test_a_family_with_too_few_texts_is_refused_with_the_remedy() -> None:
    few = ProblemSettings(families=(FamilySettings(name="count_bits", options={"max_n": 20}),), num_heldout=30)
    with pytest.raises(ProblemError, match=r"lower problems\.num_heldout"):
        ProblemStream(few, seed=1)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (FamilySettings(name="product"), "did you mean products"),
        (FamilySettings(name="gcd", options={"biggest": 3}), "gcd refuses options"),
        (FamilySettings(name="gcd", options={"min_value": 9, "max_value": 3}), "gcd refuses options"),
        (FamilySettings(name="gcd", template="{numeral}"), "cannot be filled"),
    ],
)
def test_a_wrong_family_is_named(family: FamilySettings, message: str) -> None:
    with pytest.raises(ProblemError, match=message):
        ProblemStream(ProblemSettings(families=(family,), num_heldout=1), seed=1)


@settings(deadline=None)  # a busy machine is no failure
@given(count=st.integers(3, 40), epochs=st.integers(1, 4), seed=st.integers(0, 9))
def test_a_finite_source_gives_each_problem_once_per_epoch_then_ends(
    tmp_path_factory: pytest.TempPathFactory, count: int, epochs: int, seed: int
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("problems") / "p.jsonl", numbered(count))
    stream = ProblemStream(of_file(path, epochs=epochs), seed)
    size = count - 2
    assert stream.num_problems == size
    orders = [[stream.at(epoch * size + place).id for place in range(size)] for epoch in range(epochs)]
    heldout = {problem.id for problem in stream.heldout}
    for order in orders:
        assert len(order) == len(set(order)) == size
        assert heldout.isdisjoint(order)
    assert not stream.exhausted(epochs * size - 1)
    assert stream.exhausted(epochs * size)
    with pytest.raises(IndexError):
        stream.at(epochs * size)


def test_epochs_and_seeds_reshuffle_and_heldout_stays(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", numbered(60))
    one, two = ProblemStream(of_file(path), 1), ProblemStream(of_file(path), 2)
    size = 58
    orders = [[stream.at(start + n).id for n in range(size)] for stream in (one, two) for start in (0, size)]
    assert len({tuple(order) for order in orders}) == 4
    assert one.heldout == two.heldout
    assert not one.exhausted(10**9)


def test_the_order_of_an_epoch_is_the_same_with_any_python(tmp_path: Path) -> None:
    stream = ProblemStream(of_file(write_jsonl(tmp_path / "p.jsonl", numbered(8)), num_heldout=0), 1)
    ids = [stream.at(index).id for index in range(8)]
    assert ids == ["p3", "p2", "p5", "p7", "p6", "p1", "p0", "p4"]


def test_problems_with_one_text_never_fall_on_both_sides(tmp_path: Path) -> None:
    records = numbered(10) + [{**record, "id": record["id"] + "b"} for record in numbered(10)]
    stream = ProblemStream(of_file(write_jsonl(tmp_path / "p.jsonl", records), num_heldout=5), 1)
    texts = {stream.at(index).problem for index in range(stream.num_problems or 0)}
    assert texts.isdisjoint({problem.problem for problem in stream.heldout})
    assert len(texts) == 5


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no problem"),
        ("\n\n", "holds no problem"),
        ('{"id": "a", "problem": "1", "answer": "1"}\n{"id": ', r"p\.jsonl:2: not JSON"),
        ("[1]\n", r"p\.jsonl:1: a problem is a JSON object"),
        ('{"id": "a", "problem": "1"}\n', r'p\.jsonl:1: field "answer" is missing'),
        ('{"problem": "1", "answer": "1"}\n', r'p\.jsonl:1: field "id" is missing'),
        ('{"id": "a", "problem": " ", "answer": "1"}\n', r"p\.jsonl:1: problem and answer must not be empty"),
        ('{"id": "a", "problem": ["1"], "answer": "1"}\n', r'p\.jsonl:1: field "problem" is \['),
        ('\n{"id": "a", "problem": "1", "answer": "1"}\n' * 2, r'p\.jsonl:4: id "a" is used already at .*:2'),
        ("\udcff".join(['{"id": "', '"}']), r"p\.jsonl:1: not JSON"),
    ],
)
def test_a_bad_file_is_told_where_and_why(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ProblemError, match=message):
        ProblemStream(of_file(path), 1)


def test_a_file_smaller_than_the_heldout_set_is_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", numbered(5))
    with pytest.raises(ProblemError, match=r"has 5 problems .* = 512 leaves 0 .*lower it"):
        ProblemStream(of_file(path, num_heldout=512), 1)
    with pytest.raises(ProblemError, match="leaves 0 to train on"):
        ProblemStream(of_file(path, num_heldout=5), 1)


def test_parquet_gives_the_problems_of_its_rows(tmp_path: Path) -> None:
    table = pyarrow.table({"number": [1, 2, 3], "question": ["a", "b", "c"], "answer": [7, 8, 9]})
    pyarrow.parquet.write_table(table, tmp_path / "part-0.parquet")
    columns = {"id": "number", "problem": "question"}
    settings = of_file(tmp_path, source="parquet", columns=columns, num_heldout=0, epochs=1)
    stream = ProblemStream(settings, 1)
    found = {(p.id, p.problem, p.answer) for p in (stream.at(index) for index in range(3))}
    assert found == {("1", "a", "7"), ("2", "b", "8"), ("3", "c", "9")}


def test_a_parquet_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_text("not parquet")
    for path, message in [
        (tmp_path / "x.parquet", r"x\.parquet: not a Parquet file"),
        (tmp_path / "none", "no such file"),
    ]:
        with pytest.raises(ProblemError, match=message):
            ProblemStream(of_file(path, source="parquet"), 1)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ProblemError, match="no \\*\\.parquet"):
        ProblemStream(of_file(tmp_path / "empty", source="parquet"), 1)


def test_the_files_of_a_split_are_found_by_name() -> None:
    names = [
        "README.md",
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
        "data/test-00000-of-00001.parquet",
        "main/train/0000.parquet",
        "socratic/train.parquet",
    ]
    assert split_files(names, None, "test") == ["data/test-00000-of-00001.parquet"]
    assert split_files(names, "data", "train") == names[1:3]
    assert split_files(names, "main", "train") == ["main/train/0000.parquet"]
    assert split_files(names, "socratic", "train") == ["socratic/train.parquet"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "name at least one"),
        ({"families": FAMILIES, "epochs": 2}, "finite sources"),
        ({"source": "jsonl"}, r"problems\.path is missing"),
        ({"source": "jsonl", "path": "x", "families": FAMILIES}, "belongs to"),
        ({"source": "jsonl", "path": "x", "columns": {"question": "q"}}, "a problem has id, problem"),
        ({"source": "json", "path": "x"}, "reasoning_gym"),
        ({"source": "jsonl", "path": "x", "epoch": 2}, "epoch"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ProblemSettings(**fields)
