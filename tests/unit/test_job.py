"""The user's side: what a job declares, how it is found and loaded, and what its functions are called with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hetero.errors import InputError, JobFileError
from hetero.job import InputContext, Job, TrainContext
from hetero.job_file import Declaration, load_job, read_declaration

WHOLE = """
@job.inputs
def inputs(ctx): return []
@job.train
def train(ctx): pass
"""


@pytest.fixture(autouse=True)
def _imports_leave_no_trace() -> Iterator[None]:
    modules, path = dict(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]


def write(folder: Path, text: str, name: str = "a_job.py") -> str:
    """Write a job file and return the reference to its `job`."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return f"{path}:job"


def whole_job(**defaults: Any) -> Job:
    job = Job("digits", **defaults)
    job.inputs(lambda _ctx: [])
    job.train(lambda _ctx: None)
    return job


# Job


@pytest.mark.parametrize("name", ["", "  ", None, 3])
def test_a_job_needs_a_name(name: Any) -> None:
    with pytest.raises(JobFileError, match="needs a name"):
        Job(name)


def test_a_decorated_function_stays_what_it_was() -> None:
    job = Job("digits", engine="local", batch_size=32)

    @job.inputs
    def inputs(ctx: InputContext) -> list[int]:
        return [ctx.epoch]

    @job.splits
    def splits(ctx: InputContext) -> list[int]:
        return [ctx.epoch]

    @job.train
    def train(ctx: TrainContext) -> int:
        return ctx.rank

    assert (job.inputs_function, job.splits_function, job.train_function) == (inputs, splits, train)
    assert inputs(InputContext(epoch=2)) == [2]
    assert (job.name, job.engine, job.defaults) == ("digits", "local", {"batch_size": 32})
    assert repr(job) == "Job('digits', engine='local')"
    job.check()


def test_everything_that_a_job_lacks_is_named_at_once() -> None:
    with pytest.raises(JobFileError, match=r"'digits' has no @job\.inputs and no @job\.train function"):
        Job("digits").check()


# read_declaration


def test_literals_are_read_without_running_the_file(tmp_path: Path) -> None:
    reference = write(
        tmp_path,
        "import hetero\n"
        'job = hetero.Job("digits", engine="tf_data", batch_size=32, lr=-1e-3, sizes=[1, 2], deep={"a": None})\n'
        'raise RuntimeError("a launcher ran the job file")\n',
    )
    assert read_declaration(reference) == Declaration(
        "digits", "tf_data", {"batch_size": 32, "lr": -1e-3, "sizes": [1, 2], "deep": {"a": None}}
    )


@pytest.mark.parametrize(
    "line",
    ['job = Job("digits")', 'job: Job = hetero.Job("digits")', 'other = job = Job(name="digits")'],
    ids=["bare name", "annotated", "two targets"],
)
def test_every_form_of_assignment_is_found(tmp_path: Path, line: str) -> None:
    assert read_declaration(write(tmp_path, line)) == Declaration("digits", None, {})


def test_of_two_assignments_the_last_counts_as_when_the_file_is_run(tmp_path: Path) -> None:
    reference = write(tmp_path, f'import hetero\njob = None\njob = hetero.Job("b", batch_size=3){WHOLE}')
    assert read_declaration(reference) == Declaration("b", None, {"batch_size": 3})
    assert load_job(reference).defaults == {"batch_size": 3}


@pytest.mark.parametrize(
    "text",
    [b'\xef\xbb\xbfjob = Job("d\xc3\xa9")\n', b'# -*- coding: latin-1 -*-\njob = Job("d\xe9")\n'],
    ids=["byte order mark", "latin-1"],
)
def test_a_file_may_have_any_encoding_that_python_takes(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "job.py").write_bytes(text)
    assert read_declaration(f"{tmp_path}/job.py:job").name == "dé"


@pytest.mark.parametrize(
    "arguments",
    ['"digits", batch_size=SIZE', '"digits", **OPTIONS', "NAME", '*["digits"]', '"digits", odd={[]: 1}'],
)
def test_arguments_that_are_no_literals_are_refused_with_file_and_line(tmp_path: Path, arguments: str) -> None:
    with pytest.raises(JobFileError, match=r"a_job\.py:2: the arguments of Job\(\.\.\.\) must be literals"):
        read_declaration(write(tmp_path, f"\njob = Job({arguments})"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("job = Job(", r"cannot read .*a_job\.py: .*line 1"),
        ("job = 3", "`job` is not made by hetero.Job"),
        ("job = make()", "`job` is not made by hetero.Job"),
        ("job: int", "`job` is not made by hetero.Job"),
        ('task = Job("a")', r"has no top-level `job = hetero\.Job"),
        ('def f():\n    job = Job("a")', "has no top-level"),
        ("job = Job()", "takes the job's name"),
        ("job = Job(3)", "takes the job's name"),
        ('job = Job("a", "local")', "then keywords only"),
    ],
)
def test_a_file_without_a_usable_job_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        read_declaration(write(tmp_path, text))


@pytest.mark.parametrize("read", [read_declaration, load_job])
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("job.py", "is not of the form path/to/job.py:name"),
        ("job.py:", "is not of the form"),
        (":job", "is not of the form"),
        ("job.py:not-a-name", "is not of the form"),
        ("no/such/file.py:job", "there is no file '/.*no/such/file.py'"),
        ("no_such_module:job", "no Python module 'no_such_module'"),
        ("json.no_such_module:job", "no Python module"),
        ("no_such_package.module:job", "no Python module"),
        ("sys:job", "no Python module 'sys'"),
        (".relative:job", "cannot find module"),
    ],
)
def test_a_reference_that_leads_nowhere_is_refused(read: Any, reference: str, message: str) -> None:
    with pytest.raises(JobFileError, match=message):
        read(reference)


def test_a_module_is_found_and_none_of_its_packages_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, 'raise RuntimeError("a launcher imported the package")', "heavy_package/__init__.py")
    write(tmp_path, 'job = Job("a")', "heavy_package/jobs.py")
    write(tmp_path, 'job = Job("b")', "spaced/inner/jobs.py")  # namespace packages
    assert read_declaration("heavy_package.jobs:job").name == "a"
    assert read_declaration("spaced.inner.jobs:job").name == "b"


# load_job


def test_a_job_is_loaded_by_path_with_its_neighbours_importable(tmp_path: Path) -> None:
    write(tmp_path, "WIDTH = 3", "the_neighbour.py")
    reference = write(tmp_path, f'import hetero, the_neighbour\njob = hetero.Job("a", width=3){WHOLE}')
    job = load_job(reference)
    assert job.name == "a"
    assert job.inputs_function is not None
    assert sys.modules[job.inputs_function.__module__].__file__ == reference.removesuffix(":job")


def test_a_job_file_named_like_a_loaded_module_replaces_nothing(tmp_path: Path) -> None:
    import json

    job = load_job(write(tmp_path, f'import hetero\njob = hetero.Job("a"){WHOLE}', "json.py"))
    assert sys.modules["json"] is json
    assert job.train_function is not None
    assert job.train_function.__module__ in sys.modules


def test_a_job_is_loaded_by_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write(tmp_path, "", "some_package/__init__.py")
    write(tmp_path, f'import hetero\njob = hetero.Job("a"){WHOLE}', "some_package/jobs.py")
    assert load_job("some_package.jobs:job").name == "a"


def test_what_the_file_raises_passes_through_and_leaves_no_half_module(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        load_job(write(tmp_path, "1 / 0", "half_module.py"))
    assert "half_module" not in sys.modules


def test_a_name_that_is_no_job_and_a_job_that_lacks_functions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"has no hetero\.Job named 'job', but 'text'"):
        load_job(write(tmp_path, "job = 'text'"))
    with pytest.raises(JobFileError, match=r"no @job\.inputs"):
        load_job(write(tmp_path, 'import hetero\njob = hetero.Job("a")'))


# splits


def test_by_default_the_splits_are_the_visible_files_of_channel_training_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.txt", ".hidden", "a/.checkpoint/x.txt", "c.txt"):
        write(tmp_path, "", name)
    context = InputContext(channels={"training": str(tmp_path)})
    assert whole_job().list_splits(context) == [str(tmp_path / name) for name in ("a/z.txt", "b.txt", "c.txt")]


def test_a_hidden_folder_above_the_channel_hides_nothing(tmp_path: Path) -> None:
    write(tmp_path, "", ".cache/data/a.txt")
    context = InputContext(channels={"training": str(tmp_path / ".cache/data")})
    assert [Path(split).name for split in whole_job().list_splits(context)] == ["a.txt"]


def test_a_channel_may_be_one_file(tmp_path: Path) -> None:
    write(tmp_path, "", "rows.csv")
    path = str(tmp_path / "rows.csv")
    assert whole_job().list_splits(InputContext(channels={"training": path})) == [path]


def test_splits_are_any_json_values_and_paths_become_text() -> None:
    job = whole_job()
    job.splits(lambda _ctx: (split for split in (Path("/a"), "b", 3, (1, 2), {"c": None})))
    assert job.list_splits(InputContext()) == ["/a", "b", 3, [1, 2], {"c": None}]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([], "has no splits"),
        (None, "returned None; it must return a list"),
        ("abc", "returned 'abc'; it must return a list"),
        ([object()], "must be JSON values"),
        ([b"bytes"], "must be JSON values"),
    ],
)
def test_splits_that_cannot_travel_are_refused(returned: Any, message: str) -> None:
    job = whole_job()
    job.splits(lambda _ctx: returned)
    with pytest.raises(InputError, match=message):
        job.list_splits(InputContext())


# channels


@pytest.mark.parametrize("context", [InputContext(channels={"a": "/x", "b": "/y"}), None])
def test_an_unknown_channel_is_refused_with_those_that_are_there(context: InputContext | None) -> None:
    have = "a, b" if context else "none"
    with pytest.raises(InputError, match=rf"no channel 'training' \(channels: {have}\).*--channel training=FOLDER"):
        (context or InputContext()).channel("training")


def test_a_channel_without_files_or_folder_is_refused(tmp_path: Path) -> None:
    context = InputContext(channels={"training": str(tmp_path), "gone": str(tmp_path / "gone")})
    with pytest.raises(InputError, match="has no files"):
        context.channel_files("training")
    with pytest.raises(InputError, match="does not exist"):
        context.channel_files("gone")


def test_files_are_the_splits_only_where_splits_are_paths() -> None:
    assert InputContext(splits=("/a", "/b")).files == ("/a", "/b")
    with pytest.raises(InputError, match=r"one is 3\. Use ctx\.splits"):
        InputContext(splits=("/a", 3)).files  # noqa: B018


# seeds


def test_seeds_depend_on_run_epoch_and_split_and_on_nothing_else() -> None:
    def seeds(run: int, epoch: int, **rest: Any) -> tuple[int, int, int]:
        context = InputContext(run_seed=run, epoch=epoch, **rest)
        return context.seed, context.seed_for("a"), context.seed_for([1, {"b": 2}])

    assert seeds(1, 0) == seeds(1, 0, splits=("a",), batch_size=7, params={"x": 1})
    values = [seed for run in range(4) for epoch in range(4) for seed in seeds(run, epoch)]
    assert len(set(values)) == len(values)


def test_seeds_are_the_same_on_every_machine_and_fit_31_bits() -> None:
    assert InputContext(run_seed=7, epoch=2).seed == 1137634507
    assert InputContext(run_seed=7, epoch=2).seed_for("part-0") == 1966036421
    assert all(0 <= InputContext(epoch=epoch).seed < 2**31 for epoch in range(1000))


# TrainContext


class Feed:
    """Two batches an epoch, and what was logged."""

    def __init__(self) -> None:
        self.logged: dict[str, Any] = {}

    def batches(self, epoch: int) -> Iterator[Any]:
        for number in range(2):
            yield type("Batch", (), {"data": (epoch, number), "mask": [True], "rows": 1})()

    def log(self, values: Any) -> None:
        self.logged.update(values)


def test_a_train_context_gives_batches_with_or_without_their_mask_and_passes_on_what_is_logged() -> None:
    feed = Feed()
    context = TrainContext(feed=feed, number_of_epochs=3, channels={"training": "/data"})
    assert list(context.epochs()) == [0, 1, 2]
    assert list(context.batches(1)) == [(1, 0), (1, 1)]
    assert list(context.batches(1, with_mask=True)) == [((1, 0), [True]), ((1, 1), [True])]
    context.log(loss=0.5)
    assert feed.logged == {"loss": 0.5}
    assert context.channel("training") == "/data"
    with pytest.raises(InputError, match="no channel 'test'"):
        context.channel("test")


@pytest.mark.parametrize(("rank", "chief"), [(0, True), (1, False)])
def test_the_chief_is_rank_0(rank: int, chief: bool) -> None:
    assert TrainContext(feed=Feed(), rank=rank, size=2).is_chief is chief
