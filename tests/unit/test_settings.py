from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.errors import EngineError, SettingsError
from hetero.options import OPTIONS, Option, likely_misspelt, options_help
from hetero.settings import Settings, find_job, resolve, resolve_engine

JOB = ("--job", "job.py:job")


def problems(*argv: str, environ: dict[str, str] | None = None, **defaults: object) -> tuple[str, ...]:
    with pytest.raises(SettingsError) as caught:
        resolve([*JOB, *argv], environ or {}, defaults)
    return caught.value.problems


def params(*argv: str) -> dict[str, object]:
    found = dict(resolve([*JOB, *argv], {}).params)
    del found["epochs"]
    return found


def test_defaults_are_those_of_the_table():
    settings = resolve(JOB, {})
    for option in OPTIONS[1:]:
        expected = {} if option.name == "channel" else option.default
        assert getattr(settings, option.attribute) == expected, option.name


def test_every_option_is_a_field_and_every_field_an_option():
    assert {option.attribute for option in OPTIONS} | {"params"} == {field.name for field in fields(Settings)}


def test_flag_beats_environment_beats_job_beats_default():
    environ, job = {"HETERO_BATCH_SIZE": "3", "HETERO_SEED": "4"}, {"batch_size": 5, "seed": 6, "remainder": "pad"}
    settings = resolve([*JOB, "--batch-size", "2"], environ, job)
    assert (settings.batch_size, settings.seed, settings.remainder, settings.epochs) == (2, 4, "pad", 1)


def test_an_overridden_value_is_not_even_checked():
    settings = resolve([*JOB, "--seed", "x", "--seed", "1"], {"HETERO_SEED": "y"}, {"seed": "z"})
    assert settings.seed == 1


@pytest.mark.parametrize(
    "argv",
    [["--batch-size", "8"], ["--batch_size", "8"], ["--batch-size=8"], ["--batch_size=8"], ["--batch-size", '"8"']],
)
def test_every_way_to_write_a_flag(argv):
    assert resolve([*JOB, *argv], {}).batch_size == 8


def test_an_empty_variable_counts_as_not_set():
    settings = resolve(JOB, {"HETERO_TOKEN": "", "HETERO_BATCH_SIZE": ""})
    assert settings.token is None
    assert settings.batch_size == 64


@pytest.mark.parametrize("value", ["6.5", "0", "", "-1", "x", "1_000", "64.0", "nan", "9" * 50, "٣"])
def test_a_wrong_number_is_named_with_flag_value_and_need(value):
    (problem,) = problems(f"--batch-size={value}")
    assert problem == f"--batch-size is {value!r}; it needs a whole number from 1 to 2147483647."


@pytest.mark.parametrize("value", ["inf", "nan", "-1", "", "soon", "1_0"])
def test_a_wrong_duration_is_named(value):
    (problem,) = problems(f"--grace-s={value}")
    assert problem.startswith(f"--grace-s is {value!r}; it needs a number from 0 to 3600")


def test_durations_take_whole_numbers_and_fractions():
    settings = resolve([*JOB, "--lease-s", "2", "--grace-s", "0.5"], {}, {"start_timeout_s": 7})
    assert (settings.lease_s, settings.grace_s, settings.start_timeout_s) == (2.0, 0.5, 7.0)


def test_all_that_is_wrong_is_in_one_message():
    found = resolve_problems = problems(
        "--batch-size", "0", "--engine", "spark", "stray", "--lease-s", environ={"HETERO_SEED": "x"}, remainder="keep"
    )
    assert len(resolve_problems) == 6
    for part in ("--batch-size is '0'", "spark", "'stray'", "--lease-s has no value", "HETERO_SEED is 'x'", "keep"):
        assert any(part in problem for problem in found), part


def test_a_missing_job_is_reported_with_the_rest():
    with pytest.raises(SettingsError) as caught:
        resolve(["--seed", "x"], {})
    assert len(caught.value.problems) == 2
    assert "--job is missing" in str(caught.value)
    assert resolve([], {}, require_job=False).job == ""


def test_groups_need_two_names():
    (problem,) = problems("--data-group", "dnn_group")
    assert "both 'dnn_group'" in problem


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--shift", "-3"], {"shift": -3}),
        (["--shift", "-.5"], {"shift": "-.5"}),
        (["--shift", "-1e-3"], {"shift": -0.001}),
        (["--learning-rate=0.1"], {"learning_rate": 0.1}),
        (["--learning_rate", "0.1"], {"learning_rate": 0.1}),
        (["--augment"], {"augment": True}),
        (["--augment", "--depth", "2"], {"augment": True, "depth": 2}),
        (["--sizes", "[1, 2]"], {"sizes": [1, 2]}),
        (["--name", "digits"], {"name": "digits"}),
        (["--name", ""], {"name": ""}),
        (["--name", '"digits"'], {"name": "digits"}),
        (["--expr", "a=b=c"], {"expr": "a=b=c"}),
        (["--expr=a=b"], {"expr": "a=b"}),
        (["--option=--verbose"], {"option": "--verbose"}),
        (["--x", "1", "--x", "2"], {"x": 2}),
        (["-x", "3"], {"x": 3}),
        (["--nan", "NaN"], {"nan": "NaN"}),
        (["--huge", "1e999"], {"huge": "1e999"}),
        (["--digits", "9" * 5000], {"digits": "9" * 5000}),
        (["--deep", "[" * 100_000], {"deep": "[" * 100_000}),
        (["--", "--width", "4"], {"width": 4}),
        (["--stdin", "-"], {"stdin": "-"}),
    ],
)
def test_unknown_flags_are_the_jobs(argv, expected):
    assert params(*argv) == expected


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["stray"], "unexpected 'stray'"),
        (["--sizes", "1", "2"], "If it belongs to --sizes, give a JSON list"),
        (["-abc"], "cannot read '-abc'"),
        (["--width", "-abc"], "--name=-abc"),
        (["--=3"], "cannot read '--=3'"),
        (["-3"], "cannot read '-3'"),
    ],
)
def test_what_cannot_be_read_is_a_problem(argv, part):
    assert any(part in problem for problem in problems(*argv))


def test_epochs_are_among_the_jobs_own_options_too():
    assert resolve([*JOB, "--epochs", "3"], {}).params["epochs"] == 3
    assert resolve(JOB, {}, {"epochs": 2}).params["epochs"] == 2


def test_the_job_files_other_defaults_are_its_options():
    settings = resolve([*JOB, "--width", "9"], {}, {"width": 1, "depth": (1, 2)})
    assert settings.params == {"width": 9, "depth": [1, 2], "epochs": 1}


def test_a_job_file_cannot_choose_itself_and_needs_json_values():
    found = problems(job="other.py:job", blob=b"x")
    assert any("cannot set job" in problem for problem in found)
    assert any("blob is b'x'; it needs a JSON value" in problem for problem in found)


def test_sagemakers_additions_are_tolerated():
    argv = ["--batch_size", "64", "--job", "job.py:job", "--model_dir", "s3://bucket/x/model", "--augment", "True"]
    settings = resolve(argv, {"SM_MODEL_DIR": "/opt/ml/model", "SM_HP_BATCH_SIZE": "1"})
    assert settings.model_dir == "s3://bucket/x/model"
    assert settings.batch_size == 64


def test_channels_add_up_and_the_stronger_source_wins_by_name():
    environ = {"HETERO_CHANNEL": '{"training": "/env", "test": "/env"}'}
    argv = [*JOB, "--channel", "training=/a", "--channel", "extra=s3://bucket/k=v"]
    settings = resolve(argv, environ, {"channels": {"job": "/j", "test": "/j"}})
    assert settings.channels == {"training": "/a", "test": "/env", "extra": "s3://bucket/k=v", "job": "/j"}


@pytest.mark.parametrize("value", ["training", "=x", "training=", "a/b=c", '{"a": 1}', "{"])
def test_a_wrong_channel_is_named(value):
    (problem,) = problems(f"--channel={value}")
    assert problem.endswith("it needs NAME=PATH.")


def test_the_token_shows_nowhere():
    settings = resolve([*JOB, "--token", "12345"], {"HETERO_TOKEN": "other"})
    assert settings.token == "12345"
    assert "12345" not in repr(settings)
    assert "12345" not in json.dumps(settings.public())
    assert "token" not in settings.params
    assert resolve(JOB, {"HETERO_TOKEN": "other"}).token == "other"
    assert "12345" not in options_help()


@pytest.mark.parametrize("argv", [["--token", "hush hush"], ["--token", "hush", "hush"], ["--token=hüsh"]])
def test_a_wrong_token_is_refused_without_being_shown(argv):
    (problem,) = problems(*argv)
    assert "hush" not in problem
    assert "hüsh" not in problem
    assert "--token" in problem


def test_a_settings_object_checks_itself():
    with pytest.raises(SettingsError) as caught:
        Settings(job="j", batch_size=0, engine="x", params={"f": float("nan")})
    assert len(caught.value.problems) == 3


def test_find_job_agrees_with_resolve():
    assert find_job(["--job=a.py:j", "--job", '"b.py:j"'], {"HETERO_JOB": "c.py:j"}) == "b.py:j"
    assert find_job([], {"HETERO_JOB": "c.py:j"}) == "c.py:j"
    assert find_job(["--job"], {"HETERO_JOB": "c.py:j"}) is None
    assert find_job([], {}) is None


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("False", False), ("1", True), ("off", False), (True, True)]
)
def test_truth_values(word, value):
    assert Option("flag", bool, default=False, help="").convert(word) is value


@pytest.mark.parametrize("word", ["maybe", "", 2, None])
def test_no_truth_values(word):
    with pytest.raises(ValueError, match="truth"):
        Option("flag", bool, default=False, help="").convert(word)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@given(
    batch_size=st.integers(1, 2**31 - 1),
    seed=st.integers(0, 2**63 - 1),
    lease_s=st.floats(0.2, 86_400),
    ranks=st.none() | st.integers(1, 1024),
    token=st.none() | st.text("abcXYZ019!~", min_size=1),
    run_dir=st.none() | st.just(Path("runs/x y")),
    channels=st.dictionaries(st.text("abc", min_size=1), st.text("/s3=é", min_size=1), max_size=3),
    own=st.dictionaries(st.text(), json_values, max_size=4),
)
def test_settings_survive_their_way_to_a_child(*, batch_size, seed, lease_s, ranks, token, run_dir, channels, own):
    settings = Settings(
        job="job.py:job",
        batch_size=batch_size,
        seed=seed,
        lease_s=lease_s,
        ranks_per_host=ranks,
        token=token,
        run_dir=run_dir,
        channels=channels,
        params=own,
    )
    assert Settings.from_json(settings.to_json()) == settings


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"job": "j", "unknown": 1}', "null"])
def test_what_is_no_settings_is_refused(text):
    with pytest.raises(SettingsError, match="handed over"):
        Settings.from_json(text)


@dataclass(frozen=True)
class FakeCluster:
    homogeneous: bool
    source: str = "cluster.json"


@pytest.mark.parametrize(
    ("asked", "homogeneous", "job_engine", "expected"),
    [
        ("auto", True, None, "local"),
        ("auto", True, "tf_data", "local"),
        ("auto", True, "grpc", "local"),
        ("auto", False, None, "tf_data"),
        ("auto", False, "auto", "tf_data"),
        ("auto", False, "tf_data", "tf_data"),
        ("tf_data", False, "local", "tf_data"),
        ("local", True, "tf_data", "local"),
        ("grpc", False, None, "grpc"),
        ("auto", False, "grpc", "grpc"),
    ],
)
def test_the_engine_is_settled(asked, homogeneous, job_engine, expected):
    assert resolve_engine(Settings(job="j", engine=asked), FakeCluster(homogeneous), job_engine) == expected


@pytest.mark.parametrize(
    ("asked", "homogeneous", "job_engine", "part"),
    [
        ("grpc", True, None, "--engine is grpc, but cluster.json has no data hosts"),
        ("tf_data", True, None, "cluster.json has no data hosts"),
        ("local", False, None, "would idle"),
        ("auto", False, "local", "would idle"),
        ("auto", False, "spark", "'spark'"),
    ],
)
def test_an_engine_that_cannot_run_here_is_refused(asked, homogeneous, job_engine, part):
    with pytest.raises(EngineError) as caught:
        resolve_engine(Settings(job="j", engine=asked), FakeCluster(homogeneous), job_engine)
    assert part in str(caught.value)


def test_deterministic_is_refused_where_the_order_is_the_workers_speed():
    settings = Settings(job="j", deterministic=True)
    with pytest.raises(EngineError, match=r"--deterministic is set, but under tf_data .* Give --engine grpc"):
        resolve_engine(settings, FakeCluster(homogeneous=False), "tf_data")
    assert resolve_engine(settings, FakeCluster(homogeneous=False), "grpc") == "grpc"
    assert resolve_engine(settings, FakeCluster(homogeneous=True), "tf_data") == "local"


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("3", 3), ("1024", 1024), ("auto", "auto"), ('"auto"', "auto")])
def test_local_workers_are_a_number_or_auto(text, value):
    settings = resolve(["--job=j.py:j", "--local-workers", text], {})
    assert settings.local_workers == value
    assert Settings.from_json(settings.to_json()) == settings
    assert resolve(["--job=j.py:j"], {"HETERO_LOCAL_WORKERS": text}, {}).local_workers == value


@pytest.mark.parametrize("text", ["-1", "1025", "1.5", "Auto", "all", "true"])
def test_local_workers_that_are_neither_are_refused(text):
    (problem,) = problems(f"--local-workers={text}")
    assert problem == f"--local-workers is {text!r}; it needs a whole number from 0 to 1024, or auto."


@pytest.mark.parametrize("value", [2, "auto"])
def test_local_workers_are_refused_where_ranks_prepare_all_input_themselves(value):
    with pytest.raises(EngineError, match=rf"--local-workers is {value}, .* has no data hosts.* Leave it out"):
        resolve_engine(Settings(job="j", local_workers=value), FakeCluster(homogeneous=True), None)
    assert resolve_engine(Settings(job="j", local_workers=0), FakeCluster(homogeneous=True), None) == "local"
    assert resolve_engine(Settings(job="j", local_workers=value), FakeCluster(homogeneous=False), None) == "tf_data"


def test_leaving_out_bad_splits_is_refused_where_it_cannot_be_done():
    settings = Settings(job="j", bad_split="skip")
    for homogeneous, engine in ((False, "tf_data"), (True, "local")):
        with pytest.raises(EngineError, match=f"the engine is {engine}, which cannot leave out one split"):
            resolve_engine(settings, FakeCluster(homogeneous), engine if not homogeneous else None)


def test_only_the_standard_library_is_loaded():
    code = (
        "import sys; import hetero.settings, hetero.topology, hetero.plan, hetero.clusters;"
        "print([m for m in sys.modules if m.split('.')[0] in ('numpy', 'grpc', 'rich', 'typer', 'tensorflow', 'psutil',"
        " 'sagemaker_training', 'boto3')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(("word", "value"), [("True", True), ("False", False), ("None", None)])
def test_a_job_option_as_pythons_word_for_it_is_that_value(word: str, value: object) -> None:
    # SageMaker's toolkit prints hyperparameters as Python does; the text "False" would be true in a job's `if`.
    assert resolve(["--job", "job.py:job", "--augment", word], {}).params["augment"] is value


def test_options_that_are_almost_one_of_the_runs_are_told():
    said = likely_misspelt(["batchsize", "epoch", "epochs", "width", "data_prot", "seed_value"])
    assert said == [
        "--batchsize is no option of the run and goes to the job; did you mean --batch-size?",
        "--data-prot is no option of the run and goes to the job; did you mean --data-port?",
        "--epoch is no option of the run and goes to the job; did you mean --epochs?",
    ]
