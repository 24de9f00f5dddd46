"""The two server processes of the `tf_data` engine: dispatcher and worker.

Both block for the life of their process and end with it: a signal is the only way out, because stopping a server in
process waits for its clients, and the process is the unit that the launcher supervises and replaces anyway.

They never run Python code of the job, so they do not need `import tensorflow` (8 s of CPU and 480 MB, most of it Keras
and API tables): TensorFlow's library alone has every kernel and is loaded in 0.3 s and 215 MB. That matters most when a
worker is replaced in the middle of an epoch. Should a TensorFlow be laid out so that this fails, the whole package is
imported instead; `HETERO_TF_FULL_IMPORT=1` asks for that.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from hetero.errors import EngineError, PortInUse
from hetero.inputs import s3

_log = logging.getLogger(__name__)

PORT_TRIES = 64
"""How many ports after the preferred one are tried when it is taken."""
CLIENT_TIMEOUT_S = 10 * 365 * 86_400.0
"""A consumer is never given up: ranks end with the job, and TensorFlow measures by the wall clock, which can be set."""
_OWN_PORT_WAIT_S = 10.0
_claims: list[socket.socket] = []  # held for the life of the process, see _claim
_STUB_PACKAGES = ("", ".python", ".python.client", ".python.data", ".python.data.experimental",
                  ".python.data.experimental.service")  # fmt: skip


def serve_dispatcher(
    port: int,
    work_dir: Path,
    *,
    run_id: str = "",
    on_listening: Callable[[int], None] | None = None,
    on_tick: Callable[[int], None] | None = None,
    tick_s: float = 1.0,
    worker_timeout_s: float = 5.0,
    client_timeout_s: float = CLIENT_TIMEOUT_S,
) -> None:
    """Run the dispatcher until the process is killed.

    Its state is journalled under `work_dir` before each answer, so a new process with the same `work_dir` goes on where
    the last one was killed, on the same port; clients and workers reconnect by themselves.

    Args:
        port: Preferred port; if it is taken, the next free one. 0: any.
        work_dir: Directory of this run's dispatcher; created. The port is remembered in it.
        run_id: Whose state this is; a `work_dir` of another run is refused.
        on_listening: Called once with the real port, when clients can connect.
        on_tick: Called every `tick_s` with the number of registered workers.
        tick_s: Seconds between two ticks.
        worker_timeout_s: Without a heartbeat for so long a worker counts as missing.
        client_timeout_s: Without a heartbeat for so long a consumer counts as gone.

    Raises:
        EngineError: `work_dir` belongs to another run, or TensorFlow cannot run the service.
        PortInUse: No port is free, or the port of the process that is being replaced was taken meanwhile.
    """
    _refuse_foreign(work_dir, run_id)
    config_type, server_lib = _load("DispatcherConfig")

    def start(bind_port: int) -> Any:
        config = config_type(
            port=bind_port,
            protocol="grpc",
            work_dir=str(work_dir),
            fault_tolerant_mode=True,
            job_gc_check_interval_ms=1000,
            worker_timeout_ms=int(worker_timeout_s * 1000),
            client_timeout_ms=int(client_timeout_s * 1000),
        )
        return server_lib.TF_DATA_NewDispatchServer(config.SerializeToString())

    server = _bind(port, work_dir / "port", "dispatcher", start)
    _live(server, on_listening, lambda: int(server.num_workers()), on_tick, tick_s)


def serve_worker(
    dispatcher: str,
    host_address: str,
    port: int,
    *,
    port_file: Path | None = None,
    on_listening: Callable[[int], None] | None = None,
    on_tick: Callable[[int], None] | None = None,
    tick_s: float = 1.0,
    heartbeat_s: float = 0.2,
) -> None:
    """Run a worker until the process is killed.

    A worker takes over the unfinished tasks of an earlier one only under the same address, so give every worker a
    `port_file`: its successor then insists on the port found there.

    Args:
        dispatcher: "host:port" of the dispatcher; waited for without limit (the launcher has the start deadline).
        host_address: Name or address at which trainer hosts reach this host; registered with the port.
        port: Preferred port; if it is taken, the next free one. 0: any.
        port_file: Where this worker's port is remembered for its successor.
        on_listening: Called once with the real port, when the worker is registered and serves.
        on_tick: Called every `tick_s` with the number of open tasks (one an unfinished epoch).
        tick_s: Seconds between two ticks.
        heartbeat_s: Seconds between two heartbeats to the dispatcher: so long until a new process has its
            predecessor's tasks, or a finished task is gone from the count of open ones.

    Raises:
        EngineError: TensorFlow cannot run the service.
        PortInUse: No port is free, or the predecessor's port was taken meanwhile.
    """
    config_type, server_lib = _load("WorkerConfig")

    def start(bind_port: int) -> Any:
        config = config_type(
            port=bind_port,
            protocol="grpc",
            dispatcher_address=dispatcher,
            worker_address=f"{host_address}:%port%",
            data_transfer_protocol="grpc",
            data_transfer_address=f"{host_address}:%port%",
            heartbeat_interval_ms=max(1, int(heartbeat_s * 1000)),
            dispatcher_timeout_ms=3_600_000,
        )
        return server_lib.TF_DATA_NewWorkerServer(config.SerializeToString())

    server = _bind(port, port_file, "worker", start)
    _live(server, on_listening, lambda: int(server.num_tasks()), on_tick, tick_s)


def _live(
    server: Any,
    on_listening: Callable[[int], None] | None,
    count: Callable[[], int],
    on_tick: Callable[[int], None] | None,
    tick_s: float,
) -> None:
    """Announce the port, then report once a tick; the server lives as long as this frame."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if on_listening is not None:
        on_listening(int(server.bound_port()))
    while True:
        if on_tick is not None:
            on_tick(count())
        time.sleep(tick_s)


def _refuse_foreign(work_dir: Path, run_id: str) -> None:
    """Mark `work_dir` as this run's, or raise if it is another's."""
    marker = work_dir / "run_id"
    work_dir.mkdir(parents=True, exist_ok=True)
    if marker.exists():
        owner = marker.read_text(encoding="utf-8")
        if owner != run_id:
            raise EngineError(
                f"The dispatcher's work directory {work_dir} has the state of run {owner!r}, this is run {run_id!r}. "
                "Give every run a directory of its own, or delete this one."
            )
        return
    if any(work_dir.iterdir()):
        raise EngineError(
            f"The dispatcher's work directory {work_dir} has files of an unknown run. Give every run a directory of "
            "its own, or delete this one."
        )
    marker.write_text(run_id, encoding="utf-8")


def _bind(port: int, port_file: Path | None, what: str, start: Callable[[int], Any]) -> Any:
    """Start a server on a port that is ours alone: the remembered one, else the first free one from `port` on."""
    remembered = _read_port(port_file)
    deadline = time.monotonic() + _OWN_PORT_WAIT_S
    candidates = [remembered] if remembered else ([0] if port == 0 else range(port, min(port + PORT_TRIES, 65536)))
    while True:
        for candidate in candidates:
            server = _start_on(candidate, what, start)
            if server is not None:
                if port_file is not None and not remembered:
                    port_file.parent.mkdir(parents=True, exist_ok=True)
                    scratch = port_file.with_name(port_file.name + ".new")
                    scratch.write_text(str(server.bound_port()), encoding="ascii")
                    scratch.replace(port_file)
                return server
        if not remembered:
            raise PortInUse(
                f"Cannot start the tf.data {what}: ports {port} to {min(port + PORT_TRIES, 65536) - 1} are all in use. "
                "Free one or set --data-port."
            )
        if time.monotonic() >= deadline:
            raise PortInUse(
                f"Cannot replace the tf.data {what} on port {remembered}: the port is in use and its clients know no "
                f"other. Free it, or start the run anew."
            )
        time.sleep(0.1)


def _start_on(port: int, what: str, start: Callable[[int], Any]) -> Any:
    """Start a server on one port; None if somebody has it."""
    claim, number = _claim(port)
    if number is None:
        return None
    server = start(number)
    try:
        server.start()
    except RuntimeError as error:
        if claim is not None:
            claim.close()
        if "could not start" in str(error).lower():  # somebody took the port since we looked
            return None
        raise EngineError(f"TensorFlow could not start the {what} on port {number}: {error}") from error
    if claim is not None:
        _claims.append(claim)
    return server


def _read_port(port_file: Path | None) -> int | None:
    try:
        return int(port_file.read_text(encoding="ascii")) if port_file is not None else None
    except (FileNotFoundError, ValueError):
        return None


def _claim(port: int) -> tuple[socket.socket | None, int | None]:
    """Look whether a port is free, and keep other servers of ours off it.

    gRPC binds with SO_REUSEPORT: a second server on a taken port starts without complaint and gets half of the first
    one's connections. So the port is tried with a plain socket, and an abstract Unix socket of the port's name (it
    belongs to the network namespace and dies with the process) stops two processes that look at the same time.

    Returns:
        The claim, to be held as long as the port, and the port; (None, None) if it is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # noqa: S104 - as TensorFlow itself binds
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return None, None
            raise
        number = int(probe.getsockname()[1])
        if not sys.platform.startswith("linux"):
            return None, number
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0hetero-port-{number}")
        except OSError:
            claim.close()
            return None, None
        return claim, number


def _load(config_name: str) -> tuple[Any, Any]:
    """Load the service's library with the ops of tensorflow-io, if it is installed.

    Returns:
        The protobuf class of the configuration and the module that makes servers.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    server_lib = session = config_proto = None
    if os.environ.get("HETERO_TF_FULL_IMPORT", "0") != "1" and "tensorflow" not in sys.modules:
        before = set(sys.modules)
        try:
            _stub_packages()
            config_proto, server_lib, session = _service_modules()
        except Exception as error:  # whatever a future layout breaks, the full import below says what is wrong
            _log.info("tf.data service without the TensorFlow package did not work (%s): importing it", error)
            for name in set(sys.modules) - before:
                if name.split(".")[0] == "tensorflow":
                    del sys.modules[name]
            server_lib = None
    if server_lib is None or config_proto is None or session is None:
        try:
            importlib.import_module("tensorflow")
            config_proto, server_lib, session = _service_modules()
        except ImportError as error:
            raise EngineError(
                f"The tf_data engine needs TensorFlow 2.15 to 2.18 on every data host, and importing it failed: "
                f"{error}. Install tensorflow-cpu there, or use --engine grpc."
            ) from error
    _load_tensorflow_io(session)
    return getattr(config_proto, config_name), server_lib


def _stub_packages() -> None:
    """Put empty packages where `import tensorflow` would run everything; their submodules are found as usual."""
    spec = importlib.util.find_spec("tensorflow")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("no module named tensorflow")
    root = Path(next(iter(spec.submodule_search_locations)))
    for suffix in _STUB_PACKAGES:
        package = ModuleType("tensorflow" + suffix)
        package.__path__ = [str(root.joinpath(*suffix.split(".")))]
        sys.modules[package.__name__] = package


def _service_modules() -> tuple[Any, Any, Any]:
    config_proto = importlib.import_module("tensorflow.core.protobuf.service_config_pb2")
    importlib.import_module("tensorflow.python.pywrap_tensorflow")
    server_lib = importlib.import_module("tensorflow.python.data.experimental.service._pywrap_server_lib")
    session = importlib.import_module("tensorflow.python.client._pywrap_tf_session")
    return config_proto, server_lib, session


def _load_tensorflow_io(session: Any) -> None:
    """Register tensorflow-io's ops and `s3://` without importing it; a graph may use them."""
    spec = importlib.util.find_spec("tensorflow_io")
    if spec is None or not spec.submodule_search_locations:
        return
    folder = Path(next(iter(spec.submodule_search_locations))) / "python" / "ops"
    s3.bound_waits()
    for name, load in (
        ("libtensorflow_io.so", session.TF_LoadLibrary),
        ("libtensorflow_io_plugins.so", session.TF_RegisterFilesystemPlugin),
    ):
        if not (folder / name).exists():
            continue
        try:
            load(str(folder / name))
        except Exception as error:  # built for another TensorFlow: only jobs that use it suffer, and are told by name
            _log.warning("tensorflow-io does not load here (%s): no s3:// and none of its ops", str(error)[:200])
