"""What is told of an exception; with what workers really raise: test_feed_worker.py."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from hetero.data.feed_cause import cause_of
from hetero.process.failure import Failure


class OpError(Exception):
    """As TensorFlow's."""


@pytest.fixture
def tensorflow(monkeypatch):
    module = ModuleType("tensorflow")
    module.errors = SimpleNamespace(OpError=OpError)
    monkeypatch.setitem(sys.modules, "tensorflow", module)


def message(error):
    return cause_of(error, host="algo-1", process="worker-0")["message"]


@pytest.mark.parametrize(
    ("node", "caller"),
    [("PyFunc", "numpy_function or"), ("map/EagerPyFunc_1", "py_function"), ("PyFuncStateless", "numpy_function or")],
)
def test_python_functions_inside_tf_data_are_named(tensorflow, node, caller):
    error = OpError("ValueError: row 3\n" + "x" * 100_000 + f"\t [[{{{{node {node}}}}}]] [Op:IteratorGetNext]")
    assert message(error).startswith(f"In Python code that tf.data calls through tf.{caller}")


@pytest.mark.parametrize(
    "error",
    [
        OpError("PyFunc went wrong [[{{node CheckNumerics}}]]"),
        ValueError("[[{{node PyFunc}}]]"),
        RuntimeError("tf.numpy_function"),
    ],
)
def test_nothing_is_said_of_tf_data_where_it_is_not_true(tensorflow, error):
    assert message(error) == str(error)


def test_nothing_is_said_of_tf_data_where_tensorflow_is_not_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorflow", raising=False)
    assert message(OpError("[[{{node PyFunc}}]]")) == "[[{{node PyFunc}}]]"


def test_a_cause_is_a_failure_and_begins_with_the_jobs_own_code():
    try:
        {}["label"]
    except KeyError as error:
        failure = Failure.from_dict(cause_of(error, host="algo-1", process="worker-0"))

    assert failure.describe() == "KeyError: 'label' (worker-0 on algo-1)"
    assert failure.traceback.splitlines()[-1] == "KeyError: 'label'"
    assert '{}["label"]' in failure.traceback


def test_an_exception_without_a_traceback_is_told_too():
    assert cause_of(ValueError("x"), host="", process="worker-0")["traceback"] == "ValueError: x"
