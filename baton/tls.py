"""Files of certificates, and what a client makes of them.

The scheme of an address says whether a connection is encrypted (`grpcs://`, `https://`). The files
only say whom to trust, and how to name oneself.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final, NamedTuple

import grpc


class TlsFiles(NamedTuple):
    """Paths of PEM files. All may be empty: then the system's authorities are trusted."""

    ca: str = ""
    """Certificates of the authorities to trust."""
    cert: str = ""
    """One's own certificate, with those that lead to its authority behind it."""
    key: str = ""
    """Its key, without a password."""
    name: str = ""
    """The name that the server's certificate must have, over gRPC; "": the address's host."""

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of a gRPC channel, as the files are now.

        Raises:
            ValueError: the files do not fit each other, or are none of certificates.
            OSError: a file cannot be read.
        """
        self.client_context()  # gRPC takes anything, and complains at each connection.
        ca, cert, key = (Path(path).read_bytes() if path else None for path in self[:3])
        return grpc.ssl_channel_credentials(ca, key, cert)

    def client_context(self) -> ssl.SSLContext:
        """A context for HTTP. Raises as `channel_credentials` does."""
        if self.ca:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            trust(context, self.ca)
        else:
            context = ssl.create_default_context()
        if self.cert or self.key:
            present(context, self.cert, self.key)
        return context


NO_FILES = TlsFiles()


def holders_files(certs: str, holder: str) -> TlsFiles:
    """A holder's files in a folder that `baton certs` made; none for "".

    Args:
        certs: the folder.
        holder: `router`, or a pool of workers.
    """
    return files_in(str(Path(certs).absolute() / holder)) if certs else NO_FILES


_NAMES: Final = (("ca.pem", "cert.pem", "key.pem"), ("ca.crt", "tls.crt", "tls.key"))
"""Names of a holder's files: as `baton certs` writes them, and as a secret of Kubernetes has
them."""


def files_in(folder: str, ca: str = "", cert: str = "", key: str = "") -> TlsFiles:
    """The files of a holder's own folder; none for "". What is named by itself comes first."""
    usual, kubernetes = _NAMES
    names = kubernetes if (Path(folder) / kubernetes[1]).exists() else usual
    found = [str(Path(folder) / name) for name in names] if folder else [""] * 3
    given = zip((ca, cert, key), found, strict=True)
    return TlsFiles(*(own or other for own, other in given))


def check_scheme(address: str, files: TlsFiles, *schemes: str) -> None:
    """Checks that files are given for an encrypted address alone.

    Args:
        address: where to connect.
        files: what was given.
        schemes: of encrypted addresses, such as `grpcs://`.

    Raises:
        ValueError: the connection would not be encrypted, though there are files.
    """
    if any(files) and not address.startswith(schemes):
        raise ValueError(f"TLS files need an address with {' or '.join(schemes)}, not {address!r}")


def trust(context: ssl.SSLContext, ca: str) -> None:
    """Lets a context trust the authorities in a file. Raises ValueError, OSError."""
    Path(ca).read_bytes()  # The error of the next call does not name the file.
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ValueError(f"{ca} has no certificate in PEM ({reason_of(error)})") from None


def present(context: ssl.SSLContext, cert: str, key: str) -> None:
    """Lets a context name itself by a certificate. Raises ValueError, OSError."""
    if not (cert and key):
        raise ValueError("a certificate and its key come together")
    for path in (cert, key):
        Path(path).read_bytes()
    try:
        context.load_cert_chain(cert, key, password=lambda: "")
    except ssl.SSLError as error:
        raise ValueError(f"{cert} and {key} are no pair in PEM ({reason_of(error)})") from None


def reason_of(error: ssl.SSLError) -> str:
    """A few words about an error of OpenSSL's."""
    reason = getattr(error, "verify_message", "") or str(error.reason or error)
    return reason.replace("_", " ").lower()
