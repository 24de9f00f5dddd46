"""The ranks' exchange with TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from certificates import CertificateAuthority

from hetero.data.exchange import Exchange, ExchangeServer
from hetero.errors import PeerNeverCame, SettingsError, Unauthorised
from hetero.tls import PLAIN, Tls


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return CertificateAuthority(tmp_path_factory.mktemp("ca")).host()


@pytest.fixture
def server(host: Tls) -> Iterator[ExchangeServer]:
    server = ExchangeServer("secret", "127.0.0.1", tls=host)
    yield server
    server.stop(grace_s=0.5)


def test_ranks_exchange_values_over_tls(server: ExchangeServer, host: Tls) -> None:
    first, second = (Exchange(f"127.0.0.1:{server.port}", rank, 2, "secret", tls=host) for rank in range(2))
    second.publish("result-1", b"seven")
    assert first.wait("result-1", 10.0) == b"seven"
    first.close()
    second.close()


def test_the_token_is_needed_all_the_same(server: ExchangeServer, host: Tls) -> None:
    with pytest.raises(Unauthorised):
        Exchange(f"127.0.0.1:{server.port}", 0, 2, "wrong", tls=host)


def test_a_rank_that_cannot_connect_says_why(server: ExchangeServer, tmp_path: Path) -> None:
    other = Tls(ca=CertificateAuthority(tmp_path, "other").ca)
    with pytest.raises(PeerNeverCame, match=r"not signed by --tls-ca .*other\.pem"):
        Exchange(f"127.0.0.1:{server.port}", 0, 2, "secret", connect_timeout_s=1.0, tls=other)
    with pytest.raises(PeerNeverCame, match=r"give --tls-ca here too"):
        Exchange(f"127.0.0.1:{server.port}", 0, 2, "secret", connect_timeout_s=1.0, tls=PLAIN)


def test_a_server_that_cannot_use_its_files_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--tls-ca is '.*absent\.pem', which cannot be read"):
        ExchangeServer("secret", "127.0.0.1", tls=Tls(ca=tmp_path / "absent.pem"))
