"""TLS between the hosts of a job: which PEM files, what is wrong with them, and gRPC ports and channels that use them.

Every host serves something and calls the others, so all hosts get the same three options. Servers show a certificate;
clients check that the CA signed it and that it names the host they called. Who may call is the token's business.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hetero.errors import SettingsError

Options = Sequence[tuple[str, Any]]


@dataclass(frozen=True)
class Tls:
    """The PEM files of one host.

    Attributes:
        cert: Certificate that this host's servers show, followed by intermediate ones if there are any.
        key: Its private key, not encrypted.
        ca: Certificates that this host's clients trust.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    @property
    def enabled(self) -> bool:
        """Whether connections are encrypted: any of the files is given."""
        return any(path is not None for path in (self.cert, self.key, self.ca))

    def check(self) -> list[str]:
        """Return what is wrong with the files, one sentence each; certificates that have expired included."""
        problems = [
            f"{option} is {str(given)!r} but {other} is not set; {why}"
            for option, given, other, absent, why in (
                ("--tls-key", self.key, "--tls-cert", self.cert, "give the certificate that belongs to the key"),
                ("--tls-cert", self.cert, "--tls-key", self.key, "give the certificate's private key"),
                ("--tls-cert", self.cert, "--tls-ca", self.ca, "give the CA that signed it, for calls to other hosts"),
            )
            if given is not None and absent is None
        ]
        files = (("--tls-cert", self.cert), ("--tls-key", self.key), ("--tls-ca", self.ca))
        problems += [problem for option, path in files if path is not None and (problem := _unreadable(option, path))]
        if problems:
            return problems
        server, problem = _server_side(self.cert, self.key)
        client, other_problem = _client_side(self.ca)
        problems = [found for found in (problem, other_problem) if found]
        if server is not None and client is not None and (reason := _refusal(server, client)):
            problems.append(
                f"--tls-cert is {str(self.cert)!r}, which --tls-ca {str(self.ca)!r} does not accept: {reason}. "
                "Have the CA sign a new one, or give the CA that signed this one"
            )
        return problems

    def server_credentials(self) -> Any | None:
        """Return grpc.ServerCredentials; None when not enabled.

        Raises:
            SettingsError: A file is missing or cannot be used, or there is no certificate to serve with.
        """
        if not self.enabled:
            return None
        problems = self.check()
        if self.cert is None and not problems:
            problems = [
                "--tls-ca is set but --tls-cert is not; a host that serves others needs --tls-cert and --tls-key"
            ]
        if problems or self.cert is None or self.key is None:
            raise SettingsError(problems)
        import grpc

        return grpc.ssl_server_credentials([(self.key.read_bytes(), self.cert.read_bytes())])

    def channel_credentials(self) -> Any | None:
        """Return grpc.ChannelCredentials; None when not enabled.

        Raises:
            SettingsError: A file is missing or cannot be used.
        """
        if not self.enabled:
            return None
        problems = self.check()
        if problems or self.ca is None:
            raise SettingsError(problems)
        import grpc

        return grpc.ssl_channel_credentials(self.ca.read_bytes())


PLAIN = Tls()
"""No encryption."""
_LONGEST_WAIT_S = 5.0


def bind(server: Any, address: str, tls: Tls = PLAIN) -> int:
    """Let a server listen.

    Args:
        server: grpc.Server or grpc.aio.Server.
        address: "host:port"; port 0 takes any free one.
        tls: Whether and with what to encrypt.

    Returns:
        The port.

    Raises:
        RuntimeError: gRPC cannot bind the address.
        SettingsError: The files cannot be used.
    """
    credentials = tls.server_credentials()
    if credentials is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, credentials))


def channel(address: str, options: Options = (), tls: Tls = PLAIN) -> Any:
    """Return a grpc.Channel to "host:port"; it connects when first used.

    Raises:
        SettingsError: The files cannot be used.
    """
    import grpc

    _let_waiting_threads_sleep(grpc)
    credentials = tls.channel_credentials()
    if credentials is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, credentials, options=options)


def _let_waiting_threads_sleep(grpc: ModuleType) -> None:
    """Have a thread that waits for a call look every 5 s whether it is over; its end wakes the thread at once anyway.

    gRPC looks ten times a second, for Pythons whose signal handlers had to wait for that. They have not since Python 3,
    and on a host with a third of a CPU the threads of a rank that wait for pushes cost a percent of what it has.
    """
    common = getattr(grpc, "_common", None)
    if isinstance(getattr(common, "MAXIMUM_WAIT_TIMEOUT", None), float):
        common.MAXIMUM_WAIT_TIMEOUT = _LONGEST_WAIT_S  # type: ignore[union-attr]


def aio_channel(address: str, options: Options = (), tls: Tls = PLAIN) -> Any:
    """Return a grpc.aio.Channel to "host:port"; as `channel`."""
    import grpc.aio

    credentials = tls.channel_credentials()
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, credentials, options=options)


def explain(problem: str, tls: Tls = PLAIN, *, worked: bool = False) -> str:
    """Say in words what gRPC's text means where a connection failed because of TLS; else return the text as it is.

    Args:
        problem: What gRPC says about a call that failed.
        tls: What the channel used.
        worked: Whether the same server has answered before: then a connection without TLS that breaks is only that.
    """
    text = problem.lower()
    for mark, meaning in _MEANINGS if tls.enabled else () if worked else _PLAIN_MEANINGS:
        if mark in text:
            return f"{meaning.format(ca=tls.ca)} [{problem}]"
    return problem


def is_handshake(problem: str) -> bool:
    """Say whether gRPC's text tells of a failed TLS handshake: more tries will not help."""
    return any(mark in problem.lower() for mark, _ in _MEANINGS)


_MEANINGS = (
    ("certificate has expired", "TLS: the server's certificate has expired; renew its --tls-cert"),
    ("certificate is not yet valid", "TLS: the server's certificate is not valid yet; compare the hosts' clocks"),
    ("hostname verification", "TLS: the server's certificate does not name the address called; add it to its SANs"),
    ("peer name", "TLS: the server's certificate does not name the address called; add it to its SANs"),
    ("certificate_verify_failed", "TLS: the server's certificate is not signed by --tls-ca {ca}"),
    ("wrong_version_number", "TLS: the server does not speak TLS; give it --tls-cert and --tls-key, like this host"),
    ("handshake failed", "TLS: the server and this host could not agree on a connection"),
)
_PLAIN_MEANINGS = tuple(
    (mark, "the server hung up at once; if the job uses TLS, give --tls-ca here too")
    for mark in ("socket closed", "connection reset", "settings frame")
)


def _unreadable(option: str, path: Path) -> str | None:
    try:
        with path.open("rb"):
            return None
    except OSError as error:
        return f"{option} is {str(path)!r}, which cannot be read ({error.strerror}); name a PEM file"


def _server_side(cert: Path | None, key: Path | None) -> tuple[ssl.SSLContext | None, str | None]:
    """Load certificate and key; else say what is wrong with which of them."""
    if cert is None or key is None:
        return None, None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    encrypted = False

    def password() -> str:
        nonlocal encrypted
        encrypted = True
        return ""

    try:
        context.load_cert_chain(cert, key, password=password)  # without `password` it would ask at the terminal
    except (ssl.SSLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", None)
        if encrypted:
            return None, f"--tls-key is {str(key)!r}, which is encrypted; give a key without a password"
        if reason == "KEY_VALUES_MISMATCH":
            return None, f"--tls-key is {str(key)!r}, which does not belong to --tls-cert {str(cert)!r}"
        if problem := _no_certificate("--tls-cert", cert):
            return None, problem
        text = reason or "it is no private key in PEM form"
        return None, f"--tls-key {str(key)!r} with --tls-cert {str(cert)!r} cannot be used: {text}"
    return context, None


def _client_side(ca: Path | None) -> tuple[ssl.SSLContext | None, str | None]:
    if ca is None:
        return None, None
    if problem := _no_certificate("--tls-ca", ca):
        return None, problem
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # each host has names of its own; whoever calls checks them
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_TRUSTED_FIRST  # as gRPC does
    context.load_verify_locations(ca)
    return context, None


def _no_certificate(option: str, path: Path) -> str | None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        reason = getattr(error, "reason", None) or str(error)
        return f"{option} is {str(path)!r}, which holds no certificate in PEM form ({reason})"
    return None


def _refusal(server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> str | None:
    """Let the two shake hands in memory; return why the client refuses the server's certificate."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(8):  # two rounds do for TLS 1.3, three for 1.2
        done = True
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                done = False
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
            except ssl.SSLError as error:
                return error.reason or str(error)
        if done:
            return None
    return "the handshake does not end"
