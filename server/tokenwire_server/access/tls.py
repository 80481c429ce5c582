"""TLS: the server certificate, its key and the CA for client certificates, reloaded when the files change."""

import logging
import pathlib
import ssl

import grpc

from tokenwire_server.access.files import AccessError, Fingerprint, fingerprint, read, warn_if_world_readable

logger = logging.getLogger(__name__)

_CERT, _KEY, _CLIENT_CA = "--tls-cert", "--tls-key", "--tls-client-ca"


class TlsFiles:
    """The TLS files of a server."""

    def __init__(self, cert: str, key: str, client_ca: str | None) -> None:
        """Set the paths; `credentials` reads the files. All of them are PEM.

        Args:
            cert: the server certificate, followed by its intermediate certificates.
            key: the private key of the certificate, without a passphrase.
            client_ca: the CA certificates that client certificates are verified against; None means that clients need
                no certificate.

        """
        self._cert = pathlib.Path(cert)
        self._key = pathlib.Path(key)
        self._client_ca = None if client_ca is None else pathlib.Path(client_ca)
        self._loaded = fingerprint(())

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files.

        Returns:
            Credentials that are reloaded when a file changes: the next connection uses the new files.

        Raises:
            AccessError: a file cannot be read, or its content cannot be used.

        """
        self._loaded = self._fingerprint()
        initial = self._load()
        warn_if_world_readable(_KEY, self._key)
        return grpc.dynamic_ssl_server_credentials(
            initial,
            self._fetch,  # type: ignore[arg-type]  # None means unchanged
            require_client_authentication=self._client_ca is not None,
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the new certificates; None if they are unchanged or cannot be used. gRPC calls it per connection."""
        found = self._fingerprint()
        if found == self._loaded:
            return None
        self._loaded = found
        try:
            configuration = self._load()
        except AccessError as error:
            logger.error("cannot reload the TLS files, keeping the previous ones: %s", error)  # noqa: TRY400  # one line is enough
            return None
        if self._fingerprint() != found:
            # Written in the meantime, so the content that was read may not be the content that was checked.
            self._loaded = fingerprint(())
            return None
        logger.info("reloaded the TLS files")
        return configuration

    def _fingerprint(self) -> Fingerprint:
        return fingerprint(path for path in (self._cert, self._key, self._client_ca) if path is not None)

    def _load(self) -> grpc.ServerCertificateConfiguration:
        pair = (read(_KEY, self._key), read(_CERT, self._cert))
        authorities = None if self._client_ca is None else read(_CLIENT_CA, self._client_ca)
        # gRPC checks nothing before the first connection, and does not report which file is wrong.
        _check_certificates(_CERT, self._cert)
        _check_key(self._cert, self._key)
        if self._client_ca is not None:
            _check_certificates(_CLIENT_CA, self._client_ca)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)


def _check_certificates(option: str, path: pathlib.Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (OSError, ValueError):
        raise AccessError(f"{option} {path}: contains no PEM certificate") from None


def _check_key(cert: pathlib.Path, key: pathlib.Path) -> None:
    try:
        # Without a password argument OpenSSL would prompt for the passphrase on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise AccessError(f"{_KEY} {key}: is not the key of the certificate in {_CERT} {cert}") from None
        raise AccessError(f"{_KEY} {key}: contains no PEM private key without a passphrase") from None
