"""`s3://` addresses in channels and job files, by way of tensorflow-io.

tensorflow-io gives TensorFlow a file system: from then on tf.data and tf.io.gfile open `s3://bucket/key` as they open a
file. `register` loads it and mends two things about it:

- Its client waits 5 minutes for a server that says nothing, eleven times over. `bound_waits` makes that seconds.
- A process that has used it aborts at its own end, with exit code 134 and "pure virtual method called": the client's
  destructor writes to a log that is destroyed already (github.com/tensorflow/io, issues 1912 and 2039). After
  `register` the process ends before the destructors, with the code that it was given.

hetero's own processes call `register` where a channel is an `s3://` address. Others that read from S3, such as a script
or a process that `inputs` starts by `spawn`, call it themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hetero.errors import InputError

SCHEME = "s3://"
WAITS_MS = {"S3_CONNECT_TIMEOUT_MSEC": 3_000, "S3_REQUEST_TIMEOUT_MSEC": 10_000}
"""How long tensorflow-io waits for a connection, and for the next byte, where the environment does not say.

It tries a request eleven times, with pauses of 25 s in all: a host that cannot be reached is given up after 1 minute,
one that says nothing after 2.5; reading, as against listing, four times as late.
"""
_CONNECTIONS = 16  # requests at a time while a prefix is listed; tensorflow-io's client has 25 connections
_ADDRESS = re.compile(r"s3://[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9](/[^\0-\x1f\x7f]*)?")
_MEANT_AS_ADDRESS = re.compile(r"s3[an]?:", re.IGNORECASE)
_MESSAGE_CHARS, _SHOWN_NAMES = 500, 3
_INSTALL = (
    "Install the release of tensorflow-io that was made for this TensorFlow (for 2.16: tensorflow-io==0.37.1) on every "
    "host that lists or reads the channel."
)
_mended: set[int] = set()  # this process's id, once its end is taken care of; empty in one that was just started


def is_address(value: object) -> bool:
    """Tell whether a channel's value is an address in S3, as against a folder."""
    return isinstance(value, str) and value.startswith(SCHEME)


def problem_of(address: str) -> str | None:
    """Say what is wrong with something that was meant as an address in S3; None: nothing, or it is something else."""
    if not _MEANT_AS_ADDRESS.match(address) or _ADDRESS.fullmatch(address):
        return None
    form = "an address in S3 has the form s3://bucket/prefix"
    if not address.startswith(SCHEME):
        return f"{form}, with small letters and two slashes"
    bucket, _ = _split(address)
    if not bucket:
        return f"{form}, but this one names no bucket"
    if _ADDRESS.fullmatch(SCHEME + bucket):
        return f"{form}, and a prefix has no control characters"
    return f"{form}, and {bucket!r} is no bucket: its name has 3 to 63 letters, digits, dots and hyphens"


def bound_waits() -> None:
    """Set how long tensorflow-io waits for a server, where the environment does not; before the first use of `s3://`.

    Credentials are looked for as ever: AWS_ACCESS_KEY_ID and its kin, the profile, the container's endpoint
    (AWS_CONTAINER_CREDENTIALS_RELATIVE_URI, which is SageMaker's way), the instance.
    """
    for name, wait_ms in WAITS_MS.items():
        os.environ.setdefault(name, str(wait_ms))


def register() -> None:
    """Let TensorFlow of this process open `s3://` addresses, and let the process end with its own exit code after that.

    May be repeated. It imports TensorFlow. What C code has registered with `atexit` before this call is not called at
    the end of the process; Python's own `atexit` is.

    Raises:
        InputError: TensorFlow or tensorflow-io is missing, or the two do not fit together.
    """
    bound_waits()
    try:
        tf = importlib.import_module("tensorflow")
        importlib.import_module("tensorflow_io")
    except ImportError as error:
        raise InputError(f"s3:// needs TensorFlow and tensorflow-io, but here is {error}. {_INSTALL}") from error
    if "s3" not in tf.io.gfile.get_registered_schemes():
        raise InputError(f"tensorflow-io does not load under TensorFlow {tf.__version__}: no s3://. {_INSTALL}")
    if not _mended:
        _mended.add(os.getpid())
        _end_before_destructors()


def prepare(channels: Mapping[str, str]) -> None:
    """Call `register` where a channel is an address in S3; if that fails say so and go on: the job may not need it."""
    name = next((name for name, value in channels.items() if is_address(value)), None)
    if name is None:
        return
    try:
        register()
    except InputError as error:
        print(f"hetero: channel {name!r} is {channels[name]}. {error}", file=sys.stderr, flush=True)


def hint(message: str) -> str:
    """Return what to do about an error of TensorFlow that comes from a missing `register`; "" if it is another."""
    if "File system scheme 's3' not implemented" not in message:
        return ""
    return f"tensorflow-io is missing there, or does not load, so there is no s3://. {_INSTALL}"


def files(address: str) -> list[str]:
    """Return the addresses of all objects below a prefix, sorted; of the object itself if the address is one.

    A prefix counts as a folder: `s3://bucket/train` has `train/a`, and not `train-2/a`. Left out are names that begin
    with a dot and what is below them, markers of folders (`train/`), and keys with an empty part (`train//a`), which
    tensorflow-io does not see. It takes two requests for each object, and one for each 100 names.

    Args:
        address: `s3://bucket` or `s3://bucket/prefix`.

    Raises:
        InputError: There are none; there is no such bucket; access is denied; nobody answers; `register` failed.
    """
    problem = problem_of(address) if _MEANT_AS_ADDRESS.match(address) else "an address in S3 is s3://bucket/prefix"
    if problem is not None:
        raise InputError(f"{address!r} cannot be listed: {problem}.")
    register()
    bucket, prefix = _split(address)
    root = f"{SCHEME}{bucket}/{prefix.rstrip('/')}"
    with translated(f"{address} cannot be listed", address), _Requests() as requests:
        found = requests.walk(root)
        if not found and prefix and not prefix.endswith("/") and requests.is_object(root):
            found = [root]
        if not found:
            raise InputError(_nothing(address, requests))
    return sorted(found)


def read_bytes(address: str) -> bytes:
    """Return the content of an object.

    Args:
        address: `s3://bucket/key`.

    Raises:
        InputError: There is no such object; access is denied; nobody answers; `register` failed.
    """
    register()
    tf = importlib.import_module("tensorflow")
    with translated(f"{address} cannot be read", address):
        try:
            return bytes(tf.io.gfile.GFile(address, "rb").read())
        except tf.errors.NotFoundError as error:
            raise InputError(f"{address} cannot be read: there is no such object. Put it there.") from error


class _Requests:
    """Questions to S3, in threads: many are under way at once, and signals are heard meanwhile.

    A context manager: leaving it waits for nothing.
    """

    def __init__(self) -> None:
        # Not tf.io.gfile.listdir: it asks first whether the folder exists, which hides why it could not be asked.
        self._io = importlib.import_module("tensorflow.python.lib.io._pywrap_file_io")
        self._tf = importlib.import_module("tensorflow")
        self._threads = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="hetero-s3")

    def __enter__(self) -> _Requests:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def names(self, *folders: str) -> list[list[str]]:
        """Return the names in each folder; one that is an object and a folder comes twice."""
        return list(self._threads.map(self._io.GetChildren, folders))

    def is_object(self, path: str) -> bool:
        """Tell whether there is an object of this name."""
        return self._threads.submit(self._is_folder, path).result() is False

    def walk(self, root: str) -> list[str]:
        """Return all objects below a folder, level by level."""
        found: list[str] = []
        folders = [root]
        while folders:
            paths: Counter[str] = Counter()
            for folder, names in zip(folders, self.names(*folders), strict=True):
                paths.update(f"{folder.rstrip('/')}/{name}" for name in names if not name.startswith("."))
            once = [path for path, count in paths.items() if count == 1]
            is_folder = dict(zip(once, self._threads.map(self._is_folder, once), strict=True))
            found += [path for path in paths if is_folder.get(path, False) is False]
            folders = [path for path in paths if is_folder.get(path, True) is True]
        return found

    def _is_folder(self, path: str) -> bool | None:
        """Tell whether a name is a folder's; None: it has gone meanwhile."""
        try:
            return bool(self._io.Stat(path).is_directory)
        except self._tf.errors.NotFoundError:  # so it says, too, where an object may be listed but not be read
            try:
                self._tf.io.gfile.GFile(path, "rb").read(1)
            except self._tf.errors.NotFoundError:
                return None
            return False


def _split(address: str) -> tuple[str, str]:
    """Return bucket and prefix."""
    bucket, _, prefix = address.removeprefix(SCHEME).partition("/")
    return bucket, prefix


def _nothing(address: str, requests: _Requests) -> str:
    """Say that there are no objects, and what might have been meant."""
    bucket, prefix = _split(address.rstrip("/"))
    what = f"has no object below the prefix {prefix + '/'!r}" if prefix else "has no object"
    said = f"{address}: bucket {bucket!r} {what}, but for such as begin with a dot. Correct it, or put the data there."
    if any(sign in prefix for sign in "*?["):
        return f"{said} A prefix is no pattern: name the folder."
    parent, _, last = f"{SCHEME}{bucket}/{prefix}".rpartition("/")
    with contextlib.suppress(Exception):  # it is only advice
        near = sorted(name for name in set(requests.names(parent + "/")[0]) if name != last and name.startswith(last))
        if near and last:
            shown = ", ".join(near[:_SHOWN_NAMES]) + (", ..." if len(near) > _SHOWN_NAMES else "")
            said += f" A prefix counts as a folder; beside it are {shown}."
    return said


@contextlib.contextmanager
def translated(what: str, address: str) -> Iterator[None]:
    """Turn TensorFlow's errors into ours.

    Args:
        what: What failed, as the beginning of a sentence: "s3://bucket/key cannot be read".
        address: The address whose bucket and prefix are named.

    Raises:
        InputError: TensorFlow raised an error; says why, and what to do.
    """
    errors = importlib.import_module("tensorflow").errors
    try:
        yield
    except errors.OpError as error:
        raise InputError(f"{what}: {_reason(address, error, errors)}") from error


def _reason(address: str, error: Any, errors: Any) -> str:
    bucket, prefix = _split(address)
    text = " ".join(str(error.message).split()).strip(": ")[:_MESSAGE_CHARS] or type(error).__name__
    endpoint = os.environ.get("S3_ENDPOINT")
    region = os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION") or "us-east-1"
    where = f"S3_ENDPOINT {endpoint}" if endpoint else f"Amazon S3 in region {region}"
    if isinstance(error, errors.NotFoundError):
        return f"there is no bucket {bucket!r} at {where} ({text}). Correct the address, or S3_ENDPOINT and AWS_REGION."
    if isinstance(error, errors.PermissionDeniedError | errors.UnauthenticatedError):
        objects = f"{prefix.rstrip('/')}/*" if prefix else "*"
        return (
            f"{where} denies access ({text}). The role or the keys of this host need s3:ListBucket on bucket "
            f"{bucket!r} and s3:GetObject on {objects!r} in it."
        )
    if "curlCode" in text:
        scheme = " Without http:// it means https://." if endpoint and "://" not in endpoint else ""
        return (
            f"{where} does not answer ({text}). See that this host reaches it; correct S3_ENDPOINT, AWS_REGION or "
            f"S3_VERIFY_SSL.{scheme}"
        )
    return (
        f"{where} answers {text!r} about bucket {bucket!r}, prefix {prefix!r}. Is AWS_REGION the bucket's region, and "
        "are the credentials still good?"
    )


def _end_before_destructors() -> None:
    """Have the C library end this process, with the exit code that it was given, before destructors of C++ run.

    The library calls first what was registered last: C's streams are flushed, and that is the end. All that Python does
    at its end comes before.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "on_exit"):  # not the GNU C library
        return
    library.on_exit.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    for function in (library._exit, library.fcloseall):  # noqa: SLF001  a function of C
        library.on_exit(ctypes.cast(function, ctypes.c_void_p), None)
