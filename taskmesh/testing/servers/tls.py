"""What a test server needs to speak TLS, and its clients to believe it."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode


class Tls(NamedTuple):
    """Files in PEM form. With a client's certificate the server lets in nobody without one.

    Attributes:
        ca: the authority that signed the certificates.
        certificate, key: the server's; the certificate stands for 127.0.0.1.
        client_certificate, client_key: a client's.
    """

    ca: Path
    certificate: Path
    key: Path
    client_certificate: Path | None = None
    client_key: Path | None = None

    def settings(self, port: int) -> dict[str, str]:
        """The server's settings; it speaks nothing else."""
        return {
            "port": "0",
            "tls-port": str(port),
            "tls-ca-cert-file": str(self.ca),
            "tls-cert-file": str(self.certificate),
            "tls-key-file": str(self.key),
            "tls-auth-clients": "yes" if self.client_certificate else "no",
        }

    @property
    def query(self) -> str:
        """The options of a URL that reaches the server."""
        files = {
            "ssl_ca_certs": self.ca,
            "ssl_certfile": self.client_certificate,
            "ssl_keyfile": self.client_key,
        }
        return urlencode({name: str(file) for name, file in files.items() if file is not None}, safe="/")
