"""TLS files: what is wrong with them, in words; and how servers and channels use them."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from certificates import CertificateAuthority, openssl

from hetero import tls
from hetero.errors import SettingsError
from hetero.tls import PLAIN, Tls

DEADLINE_S = 30.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def host(authority: CertificateAuthority) -> Tls:
    return authority.host()


@pytest.fixture
def other(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path, "other")


@pytest.fixture
def serve() -> Iterator[Callable[[Tls], int]]:
    servers = []

    def start(files: Tls) -> int:
        server = grpc.server(futures.ThreadPoolExecutor(1))
        handler = grpc.unary_unary_rpc_method_handler(lambda request, _: request)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Say": handler}),))
        port = tls.bind(server, "127.0.0.1:0", files)
        server.start()
        servers.append(server)
        return port

    yield start
    for server in servers:
        server.stop(None).wait(5)


def say(address: str, files: Tls) -> str:
    """Call once; return the answer or what went wrong."""
    with tls.channel(address, (("grpc.enable_http_proxy", 0),), files) as channel:
        try:
            return channel.unary_unary("/test.Echo/Say")(b"hello", timeout=10).decode()
        except grpc.RpcError as error:
            return tls.explain(error.details(), files)


def test_nothing_given_means_no_encryption(serve) -> None:
    assert not PLAIN.enabled
    assert PLAIN.check() == []
    assert PLAIN.server_credentials() is None
    assert PLAIN.channel_credentials() is None
    assert say(f"127.0.0.1:{serve(PLAIN)}", PLAIN) == "hello"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_client_with_the_ca_is_answered(serve, host: Tls, name: str) -> None:
    assert host.enabled
    assert host.check() == []
    assert say(f"{name}:{serve(host)}", host) == "hello"


def test_a_client_needs_only_the_ca(serve, host: Tls) -> None:
    only_ca = Tls(ca=host.ca)
    assert only_ca.check() == []
    assert say(f"127.0.0.1:{serve(host)}", only_ca) == "hello"
    with pytest.raises(SettingsError, match=r"needs --tls-cert and --tls-key"):
        only_ca.server_credentials()


def test_a_client_says_why_it_refuses_a_server(
    serve, authority: CertificateAuthority, host: Tls, other: CertificateAuthority
) -> None:
    address = f"127.0.0.1:{serve(host)}"
    stranger = say(address, Tls(ca=other.ca))
    assert f"not signed by --tls-ca {other.ca}" in stranger
    assert tls.is_handshake(stranger)
    elsewhere = authority.host("elsewhere", names="DNS:elsewhere")
    assert "does not name the address called" in say(f"127.0.0.1:{serve(elsewhere)}", host)
    assert "does not speak TLS" in say(f"127.0.0.1:{serve(PLAIN)}", host)


def test_a_client_without_tls_is_told_what_may_be_missing(serve, host: Tls) -> None:
    said = say(f"127.0.0.1:{serve(host)}", PLAIN)
    assert "give --tls-ca here too" in said
    assert tls.explain("Socket closed", PLAIN, worked=True) == "Socket closed", "it was not missing before"


def test_a_client_says_that_a_certificate_has_expired(authority: CertificateAuthority, host: Tls) -> None:
    old = authority.host("old", days=-1)
    server = grpc.server(futures.ThreadPoolExecutor(1))
    assert old.cert is not None
    assert old.key is not None
    pair = (old.key.read_bytes(), old.cert.read_bytes())  # it expired after the server had started
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    assert "certificate has expired; renew" in say(f"127.0.0.1:{port}", host)
    server.stop(None).wait(5)


def test_an_asyncio_server_and_channel_are_encrypted_too(host: Tls) -> None:
    async def call() -> bytes:
        server = grpc.aio.server()

        async def echo(request: bytes, _: object) -> bytes:
            return request

        handlers = {"Say": grpc.unary_unary_rpc_method_handler(echo)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
        port = tls.bind(server, "127.0.0.1:0", host)
        await server.start()
        async with tls.aio_channel(f"127.0.0.1:{port}", (), host) as channel:
            answer = await channel.unary_unary("/test.Echo/Say")(b"hello", timeout=10)
        await server.stop(None)
        return bytes(answer)

    assert asyncio.run(call()) == b"hello"


@pytest.mark.parametrize(
    ("without", "sentence"),
    [
        ("cert", r"--tls-key is '.*' but --tls-cert is not set"),
        ("key", r"--tls-cert is '.*' but --tls-key is not set"),
        ("ca", r"--tls-cert is '.*' but --tls-ca is not set"),
    ],
)
def test_files_that_belong_together_are_asked_for(host: Tls, without: str, sentence: str) -> None:
    half = replace(host, **{without: None})
    assert any(re.search(sentence, problem) for problem in half.check()), half.check()
    with pytest.raises(SettingsError, match=sentence):
        half.channel_credentials()


@pytest.mark.parametrize("which", ["cert", "key", "ca"])
def test_a_missing_file_is_named_with_its_option(host: Tls, tmp_path: Path, which: str) -> None:
    (problem,) = replace(host, **{which: tmp_path / "absent.pem"}).check()
    assert problem.startswith(f"--tls-{which} is ")
    assert "absent.pem" in problem
    assert "No such file" in problem


def test_a_key_of_another_certificate_is_refused(host: Tls, authority: CertificateAuthority) -> None:
    (problem,) = replace(host, key=authority.host("second").key).check()
    assert "does not belong to --tls-cert" in problem


@pytest.mark.parametrize("which", ["cert", "ca", "key"])
@pytest.mark.parametrize("content", [b"", b"no PEM\n", bytes(range(256))])
def test_a_file_that_is_no_pem_is_refused(host: Tls, tmp_path: Path, which: str, content: bytes) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_bytes(content)
    (problem,) = replace(host, **{which: wrong}).check()
    assert f"--tls-{which} " in problem
    assert str(wrong) in problem


def test_an_encrypted_key_is_refused_without_asking_for_its_password(host: Tls, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    openssl("pkey", "-in", host.key, "-aes256", "-passout", "pass:secret", "-out", locked)
    (problem,) = replace(host, key=locked).check()
    assert "is encrypted; give a key without a password" in problem


def test_a_certificate_that_the_ca_does_not_accept_is_found_before_anything_runs(
    authority: CertificateAuthority, host: Tls, other: CertificateAuthority
) -> None:
    (problem,) = authority.host("expired", days=-1).check()
    assert "does not accept: certificate has expired" in problem
    (problem,) = replace(host, ca=other.ca).check()
    assert "unable to get local issuer certificate" in problem


def test_text_that_has_nothing_to_do_with_tls_stays_as_it_is(host: Tls) -> None:
    for files in (PLAIN, host):
        assert tls.explain("Connection refused", files) == "Connection refused"
    assert not tls.is_handshake("Connection refused")


def test_a_thread_that_waits_for_a_call_is_not_woken_ten_times_a_second() -> None:
    tls.channel("127.0.0.1:1").close()
    assert grpc._common.MAXIMUM_WAIT_TIMEOUT >= 1.0


def test_a_call_that_waits_for_ever_is_left_by_a_signal() -> None:
    """What gRPC's many looks were for: the handler runs at once, not only when a thread looks, here once an hour."""
    code = """
import signal, sys
from hetero import tls
tls._LONGEST_WAIT_S = 3600.0
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
with tls.channel(sys.argv[1], (("grpc.enable_http_proxy", 0),)) as channel:
    channel.unary_unary("/a/b")(b"", wait_for_ready=True)
"""
    with socket.create_server(("127.0.0.1", 0)) as listener:  # takes connections and never answers
        listener.settimeout(DEADLINE_S)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        child = subprocess.Popen([sys.executable, "-c", code, address])
        try:
            listener.accept()[0].close()  # it calls
            child.send_signal(signal.SIGTERM)
            assert child.wait(DEADLINE_S) == 7
        finally:
            child.kill()
            child.wait()
