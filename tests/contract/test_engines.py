"""What a job may rely on whichever engine runs it: one suite over `local`, `tf_data` and `grpc`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import BATCH_SIZE, DOOMED, ENGINES, Engine, Seen

from hetero import batch as batches
from hetero.errors import HeteroError, InputError

JOB = f"{Path(__file__).parent / 'jobs' / 'cases.py'}:job"


@pytest.fixture(scope="module", params=list(ENGINES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One running engine for all cases that leave the job going; it outlives the tests and ends with the module."""
    with ENGINES[request.param](tmp_path_factory.mktemp(request.param), JOB) as made:
        yield made


def cases(engine: Engine) -> Any:
    """Return the job's module."""
    return sys.modules[engine.job.inputs_function.__module__]


def read(engine: Engine, case: str, size: int = 1, **options: Any) -> list[Seen]:
    """Read a case on all ranks."""
    known = cases(engine).CASES
    return engine.run(known.index(case), len(known), size, **options)


def read_well(engine: Engine, case: str, size: int = 1, **options: Any) -> list[Seen]:
    """Read a case on all ranks; it must not fail."""
    found = read(engine, case, size, **options)
    assert [seen.error for seen in found] == [None] * size, engine.outputs()
    return found


@pytest.mark.parametrize("remainder", ["drop", "pad"])
@pytest.mark.parametrize("size", [1, 2])
def test_every_row_comes_once_an_epoch_in_exact_batches_and_equal_steps(
    engine: Engine, size: int, remainder: str
) -> None:
    found = read_well(engine, "rows", size, epochs=2, remainder=remainder)

    total, step = cases(engine).ROWS, size * BATCH_SIZE
    for epoch in range(2):
        steps = [len(seen.epochs[epoch]) for seen in found]
        assert steps == [total // step if remainder == "drop" else -(-total // step)] * size
        given: Counter[int] = Counter()
        for batch in (batch for seen in found for batch in seen.epochs[epoch]):
            assert batch.data["row"].shape == batch.data["twice"].shape == batch.mask.shape == (BATCH_SIZE,)
            assert batch.rows == batch.mask.sum()
            np.testing.assert_array_equal(batch.data["twice"], 2 * batch.data["row"])
            given.update(batch.data["row"][batch.mask].tolist())
        assert set(given.values()) == {1}
        assert set(given) <= set(range(total))
        assert len(given) == (total - total % step if remainder == "drop" else total)
        full = [batch.mask.all() for seen in found for batch in seen.epochs[epoch][:-1]]
        assert all(full)
    assert {seen.dropped_rows for seen in found} == {2 * (total % step) if remainder == "drop" else 0}


def by_name(tree: Any) -> Any:
    """Return a tree in which a named tuple is known by name and fields: tf.data service makes a class of its own."""
    if not isinstance(tree, tuple):
        return tree
    kind, detail, children = tree
    detail = (detail.__name__, detail._fields) if kind == "named" else detail
    return kind, detail, tuple(by_name(child) for child in children)


def test_structures_arrive_as_the_job_made_them(engine: Engine) -> None:
    (seen,) = read_well(engine, "structures", remainder="pad")

    pair, rows = cases(engine).Pair, Counter[int]()
    for batch in seen.epochs[0]:
        row = batch.data["row"]
        number = row.astype(np.float32)
        text = [str(n).encode() for n in row]
        expected = {
            "row": row,
            "pair": pair(
                np.broadcast_to(number[:, None, None], (BATCH_SIZE, 2, 3)), (row.astype(np.uint8), row % 2 == 0)
            ),
            "deep": {
                "text": np.array([b"row " + word for word in text], dtype=object),
                "words": np.array([[word, word] for word in text], dtype=object),
                "half": (number / 2).astype(np.float16),
                "brain": number.astype(batch.data["deep"]["brain"].dtype),
                "nothing": np.zeros((BATCH_SIZE, 0, 4), np.int32),
            },
        }
        assert batch.data["deep"]["brain"].dtype.name == "bfloat16"
        (mine, tree), (theirs, other) = batches.flatten(batch.data), batches.flatten(expected)
        assert by_name(tree) == by_name(other)
        for path, one, two in zip(batches.leaf_paths(tree), mine, theirs, strict=True):
            assert one.dtype == two.dtype, path
            np.testing.assert_array_equal(one, two, err_msg=path)
        rows.update(row[batch.mask].tolist())
    assert rows == Counter(range(cases(engine).ROWS))


def only_the_jobs_fault(found: list[Seen], *words: str) -> list[BaseException]:
    """Check that every rank failed with the exit code of a job's own fault, for the reason given; return the errors."""
    errors = [seen.error for seen in found]
    for error in errors:
        assert isinstance(error, Exception)
        assert getattr(error, "exit_code", 1) == 1
        for word in words:
            assert word in str(error), f"{word!r} is not in {error!r}"
    return [error for error in errors if error is not None]


def test_rows_that_cannot_share_a_batch_are_named(engine: Engine) -> None:
    found = read(engine, "ragged", 2)

    errors = only_the_jobs_fault(found, "batch['x'] has rows of shape", "(1,)", "(2,)", "Pad them to one shape")
    assert any(isinstance(error, InputError) for error in errors)


@pytest.mark.parametrize("size", [1, 2])
def test_an_epoch_without_rows_is_an_error_on_every_rank(engine: Engine, size: int) -> None:
    for error in only_the_jobs_fault(read(engine, "empty", size), "has no rows"):
        assert isinstance(error, InputError)


def test_too_few_rows_for_a_step_name_the_options(engine: Engine) -> None:
    found = read(engine, "few", 2)

    words = ("has 6 rows over all 2 ranks", "--batch-size", "--remainder pad")
    for error in only_the_jobs_fault(found, *words):
        assert isinstance(error, InputError)


def test_what_the_jobs_code_raises_ends_the_epoch_and_is_told(engine: Engine, tmp_path: Path) -> None:
    name = next(name for name, kind in ENGINES.items() if type(engine) is kind)
    with DOOMED[name](tmp_path, JOB) as doomed:
        found = read(doomed, "raises")

        (error,) = only_the_jobs_fault(found, cases(engine).MISSING, "No such file")
        assert found[0].epochs == [[]]
        assert isinstance(error, HeteroError) or name == "local", "only in its own process is it the job's exception"
