"""TLS: certificate, key and the authority that clients' certificates must come from, read again when they change."""

import logging
import pathlib
import ssl

import grpc

from tokenwire_server.access.files import AccessError, State, read, state, warn_if_public

logger = logging.getLogger(__name__)

_CERT, _KEY, _CLIENT_CA = "--tls-cert", "--tls-key", "--tls-client-ca"


class TlsFiles:
    """The files of a server's TLS."""

    def __init__(self, cert: str, key: str, client_ca: str | None) -> None:
        """Name the files, all in PEM form.

        Args:
            cert: the server's certificate, and those between it and its authority.
            key: its private key, without a passphrase.
            client_ca: certificates of the authorities that a client's certificate must come from; None asks for none.

        """
        self._cert = pathlib.Path(cert)
        self._key = pathlib.Path(key)
        self._client_ca = None if client_ca is None else pathlib.Path(client_ca)
        self._state = state(())

    def credentials(self) -> grpc.ServerCredentials:
        """Read the files and return credentials that follow their changes, from the next connection on.

        Raises:
            AccessError: they cannot be used.

        """
        self._state = self._find_state()
        initial = self._load()
        warn_if_public(_KEY, self._key)
        return grpc.dynamic_ssl_server_credentials(
            initial,
            self._fetch,  # type: ignore[arg-type]  # None says that nothing has changed
            require_client_authentication=self._client_ca is not None,
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the files' new content; None where it is the old one or cannot be used. Called for each connection."""
        found = self._find_state()
        if found == self._state:
            return None
        self._state = found
        try:
            configuration = self._load()
        except AccessError as error:
            logger.error("the TLS files stay as they were: %s", error)  # noqa: TRY400  # the one line says it all
            return None
        if self._find_state() != found:
            # Written to meanwhile; what was read may not be what was checked.
            self._state = state(())
            return None
        logger.info("read the TLS files again")
        return configuration

    def _find_state(self) -> State:
        return state(path for path in (self._cert, self._key, self._client_ca) if path is not None)

    def _load(self) -> grpc.ServerCertificateConfiguration:
        pair = (read(_KEY, self._key), read(_CERT, self._cert))
        authorities = None if self._client_ca is None else read(_CLIENT_CA, self._client_ca)
        # gRPC would only say that something is wrong, and only with the first connection.
        _check_certificates(_CERT, self._cert)
        _check_key(self._cert, self._key)
        if self._client_ca is not None:
            _check_certificates(_CLIENT_CA, self._client_ca)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=authorities)


def _check_certificates(option: str, path: pathlib.Path) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(path)
    except (OSError, ValueError):
        raise AccessError(f"{option} {path}: holds no certificate in PEM form") from None


def _check_key(cert: pathlib.Path, key: pathlib.Path) -> None:
    try:
        # Without a passphrase at hand OpenSSL would ask the terminal for it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password="")
    except (OSError, ValueError) as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise AccessError(f"{_KEY} {key}: is not the key of the certificate in {_CERT} {cert}") from None
        raise AccessError(f"{_KEY} {key}: holds no private key in PEM form without a passphrase") from None
