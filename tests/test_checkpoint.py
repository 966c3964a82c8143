"""Checkpoints: whole or not there; the newest kept are found, damaged ones passed over."""

import json

import pytest

from learner.checkpoint import (
    MARK,
    CheckpointError,
    CheckpointInfo,
    Totals,
    begin,
    complete_steps,
    disown,
    file_sums,
    finish,
    prune,
    read_mark,
    require_same_shape,
    step_directory,
    verify,
)


def write(root, step, content=b"weights"):
    directory = begin(root, step)
    (directory / "engine").mkdir()
    (directory / "engine" / "state.pt").write_bytes(content)
    (directory / "other").write_bytes(b"x" * step)
    totals = Totals(steps=step, trajectories=2, tokens=30, loss_tokens=20, ages={0: 15, 1: 5})
    info = CheckpointInfo(run="run", step=step, ranks=2, zero_stage=1, totals=totals)
    sums = {}
    for part in range(3):
        sums |= file_sums(directory, part=part, parts=3, sync=True)
    return finish(root, info, sums), info


def test_what_is_written_is_read_back_and_verifies(tmp_path):
    directory, info = write(tmp_path, 3)
    found, sums = read_mark(directory)
    assert found == info
    assert sums["engine/state.pt"][0] == 7
    assert sums["other"][0] == 3
    verify(directory, sums, file_sums(directory))


def test_a_changed_a_missing_and_an_added_file_are_found(tmp_path):
    directory, _ = write(tmp_path, 3)
    _, sums = read_mark(directory)
    state = directory / "engine" / "state.pt"
    state.write_bytes(b"weighty")
    with pytest.raises(CheckpointError, match=r"engine/state.pt.*damaged"):
        verify(directory, sums, file_sums(directory))
    state.unlink()
    with pytest.raises(CheckpointError, match="no such file"):
        verify(directory, sums, file_sums(directory))
    state.write_bytes(b"weights")
    (directory / "stray").write_bytes(b"")
    with pytest.raises(CheckpointError, match="stray"):
        verify(directory, sums, file_sums(directory))


def test_an_attempt_that_died_is_no_checkpoint_and_is_cleared_away(tmp_path):
    write(tmp_path, 2)
    (begin(tmp_path, 4) / "half").write_bytes(b"1")
    (tmp_path / "step_6").mkdir()
    assert complete_steps(tmp_path) == [2]
    assert list(begin(tmp_path, 4).iterdir()) == []
    assert prune(tmp_path, 2) == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_a_damaged_one_is_not_among_the_newest_that_are_kept(tmp_path):
    for step in (5, 10):
        write(tmp_path, step)
    disown(step_directory(tmp_path, 10))
    disown(step_directory(tmp_path, 10))
    assert complete_steps(tmp_path) == [5]
    write(tmp_path, 6)
    assert prune(tmp_path, 2) == [5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_5", "step_6"]


def test_the_newest_two_are_kept_in_the_order_of_numbers(tmp_path):
    for step in (5, 10, 100):
        write(tmp_path, step)
    assert complete_steps(tmp_path) == [5, 10, 100]
    assert prune(tmp_path, 2) == [10, 100]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10", "step_100"]


def test_a_step_written_again_replaces_the_old_one(tmp_path):
    write(tmp_path, 3)
    directory, _ = write(tmp_path, 3, b"newer")
    assert (directory / "engine" / "state.pt").read_bytes() == b"newer"
    assert [path.name for path in tmp_path.iterdir()] == ["step_3"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": 1}', '{"schema": 99}'])
def test_a_damaged_mark_is_an_error_that_names_it(tmp_path, text):
    directory, _ = write(tmp_path, 3)
    (directory / MARK).write_text(text)
    with pytest.raises(CheckpointError, match="step_3"):
        read_mark(directory)


def test_other_ranks_another_stage_or_another_run_are_named(tmp_path):
    directory, info = write(tmp_path, 3)
    require_same_shape(directory, info, run="run", ranks=2, zero_stage=1)
    for wants, name in (({"ranks": 1}, "learner.ranks = 2"), ({"zero_stage": 3}, "learner.zero_stage = 1")):
        with pytest.raises(CheckpointError, match=name):
            require_same_shape(directory, info, **({"run": "run", "ranks": 2, "zero_stage": 1} | wants))
    with pytest.raises(CheckpointError, match="run = run"):
        require_same_shape(directory, info, run="other", ranks=2, zero_stage=1)


def test_the_mark_is_plain_json(tmp_path):
    directory, _ = write(tmp_path, 3)
    assert json.loads((step_directory(tmp_path, 3) / MARK).read_text())["step"] == 3
    assert directory == step_directory(tmp_path, 3)
