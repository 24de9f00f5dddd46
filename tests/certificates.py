"""A certificate authority for tests, made with the openssl command."""

from __future__ import annotations

import subprocess
from pathlib import Path

from hetero.tls import Tls

KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
HERE = "DNS:localhost,IP:127.0.0.1"


def openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


class CertificateAuthority:
    """Signs certificates; its files lie in `folder`."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder, self.name = folder, name
        self.ca, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        openssl("req", "-x509", *KEY, "-keyout", self._key, "-out", self.ca, "-days", "2", "-subj", f"/CN=test {name}")

    def host(self, name: str = "host", names: str = HERE, days: int = 2) -> Tls:
        """Return files of a host with a certificate for these names that is valid for so many days."""
        cert, key = (self.folder / f"{self.name}-{name}.{end}" for end in ("pem", "key"))
        request, extensions = cert.with_suffix(".csr"), cert.with_suffix(".ext")
        extensions.write_text(f"subjectAltName={names}\n")
        openssl("req", *KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        signed_by = ("-CA", self.ca, "-CAkey", self._key, "-CAcreateserial")
        openssl(*("x509", "-req", "-in", request, *signed_by, "-days", str(days), "-extfile", extensions, "-out", cert))
        return Tls(cert, key, self.ca)
