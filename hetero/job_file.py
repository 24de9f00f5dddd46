"""The job's file: what it declares, read as text by launchers, and its Job, imported by ranks.

`path/to/job.py:name` or `package.module:name`. A launcher never runs the file: it needs only what `Job(...)` declares,
and importing it would load TensorFlow on every host.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hetero.errors import JobFileError, SettingsError
from hetero.job import FRAMEWORKS, Job
from hetero.settings import Settings, find_job, resolve


@dataclass(frozen=True)
class Declaration:
    """What the text of a job file says about its job."""

    name: str
    engine: str | None
    defaults: Mapping[str, Any]


def _split_reference(reference: str) -> tuple[str, str]:
    where, separator, name = reference.rpartition(":")
    if not separator or not where or not name.isidentifier():
        raise JobFileError(f"--job {reference!r} is not of the form path/to/job.py:name or package.module:name.")
    return where, name


def _source_path(reference: str, where: str) -> Path:
    if where.endswith(".py") or "/" in where:
        path = Path(where)
        if not path.is_file():
            raise JobFileError(f"--job {reference!r}: there is no file {str(path.absolute())!r}.")
        return path
    try:
        spec = _find_spec(where)
    except (ImportError, ValueError) as error:
        raise JobFileError(f"--job {reference!r}: cannot find module {where!r}: {error}") from None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise JobFileError(f"--job {reference!r}: there is no Python module {where!r} on sys.path.")
    return Path(spec.origin)


def _find_spec(module: str) -> importlib.machinery.ModuleSpec | None:
    """Find a module as an import would, but import none of its packages: they may be heavy, and may raise."""
    top, *inner = module.split(".")
    spec = importlib.util.find_spec(top)
    for name in inner:  # each by its last name alone: for a dotted one its package would have to be imported
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def read_declaration(reference: str) -> Declaration:
    """Return what `name = hetero.Job(...)` declares, without running the file.

    Raises:
        JobFileError: no such file, broken syntax, no such job in it, or an argument that is not a literal.
    """
    where, name = _split_reference(reference)
    path = _source_path(reference, where)
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))  # bytes: Python knows about encodings
    except (SyntaxError, ValueError, OSError) as error:
        raise JobFileError(f"--job {reference!r}: cannot read {path}: {error}") from None
    for node in reversed(tree.body):  # of several assignments the last counts, as when the file is run
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return _declaration_of(node.value, name, path)
    raise JobFileError(f"--job {reference!r}: {path} has no top-level `{name} = hetero.Job(...)`.")


def _declaration_of(value: ast.expr | None, name: str, path: Path) -> Declaration:
    function = value.func if isinstance(value, ast.Call) else None
    called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)
    if not isinstance(value, ast.Call) or called != "Job":
        raise JobFileError(f"{path}: `{name}` is not made by hetero.Job(...).")
    try:
        arguments = [ast.literal_eval(argument) for argument in value.args]
        keywords = {_name_of(keyword): ast.literal_eval(keyword.value) for keyword in value.keywords}
    except (ValueError, TypeError):  # TypeError: {[]: 0} and the like
        line = f"{path}:{value.lineno}"
        problem = f"{line}: the arguments of Job(...) must be literals: launchers read them as text."
        raise JobFileError(problem) from None
    title = arguments[0] if arguments else keywords.pop("name", None)
    if not isinstance(title, str) or not title.strip() or len(arguments) > 1:
        raise JobFileError(f"{path}:{value.lineno}: Job(...) takes the job's name and then keywords only.")
    engine = keywords.pop("engine", None)
    framework = keywords.pop("framework", FRAMEWORKS[0])
    if framework not in FRAMEWORKS:
        problem = f"{path}:{value.lineno}: framework is {framework!r}; it needs {' or '.join(FRAMEWORKS)}."
        raise JobFileError(problem)
    return Declaration(title, engine, keywords)


def _name_of(keyword: ast.keyword) -> str:
    if keyword.arg is None:
        raise ValueError("**")
    return keyword.arg


def load_job(reference: str) -> Job:
    """Import the job's file and return its Job, checked for completeness.

    An exception of the file's own code passes through unchanged.

    Raises:
        JobFileError: no such file or name, or a job without `inputs` or `train`.
    """
    where, name = _split_reference(reference)
    path = _source_path(reference, where)
    module = _import_file(path) if where.endswith(".py") or "/" in where else importlib.import_module(where)
    job = getattr(module, name, None)
    if not isinstance(job, Job):
        raise JobFileError(f"--job {reference!r}: {path} has no hetero.Job named {name!r}, but {job!r}.")
    job.check()
    return job


def _module_name(path: Path) -> str:
    return f"hetero_job_{hashlib.blake2b(str(path).encode(), digest_size=6).hexdigest()}"


def _import_file(path: Path) -> ModuleType:
    """Import by path, with the file's folder first on sys.path as if it had been run as a script."""
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise JobFileError(f"--job {str(path)!r} cannot be imported: it is not a Python file.")
    sys.path.insert(0, str(path.parent.absolute()))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling of the job's classes looks here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def settle(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Declaration, Settings]:
    """Return what the job declares, and the settings with the job's own defaults in their place.

    Raises:
        JobFileError: The job cannot be used and nothing else is wrong.
        SettingsError: All that is wrong, the job included.
    """
    reference = find_job(argv, environ)
    try:
        declaration = read_declaration(reference) if reference else None
    except JobFileError as error:
        try:
            resolve(argv, environ)
        except SettingsError as others:
            raise SettingsError([str(error), *others.problems]) from error
        raise
    settings = resolve(argv, environ, declaration.defaults if declaration else None)
    assert declaration is not None  # noqa: S101  resolve() refuses to go on without a job
    return declaration, settings
