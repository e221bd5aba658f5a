"""The HTTP server of a service: its tokens, its certificate, and where it listens, or why it does not listen."""

import errno
import logging
import ssl

from keyloft.core.addresses import address_url, is_loopback
from keyloft.core.closing import AsyncClosing
from keyloft.core.engine import Engine
from keyloft.errors import InvalidArgument
from keyloft.http.app import HttpApp
from keyloft.http.context import HttpContext, Monitoring
from keyloft.http.listener import HttpListener, lacks_key, tls_context
from keyloft.http.meters import HttpMeters
from keyloft.http.origins import Origins
from keyloft.http.page.service import ServiceParts
from keyloft.http.token_file import ValidTokens
from keyloft.http.tokens import AccessToken, admin_token, new_token
from keyloft.plugins.service import DatabaseService
from keyloft.semantic.service import SemanticService
from keyloft.server.config import OFF, Config

logger = logging.getLogger(__name__)


class HttpService(AsyncClosing):
    """Serves metrics, health and, where there are tokens, the API, from before the database is open until the end."""

    def __init__(self, config: Config, monitoring: Monitoring, service: ServiceParts, meters: HttpMeters) -> None:
        """Read the tokens and the certificate.

        Args:
            config: The settings.
            monitoring: Makes the answers that need no token: metrics and health.
            service: What the admin page shows.
            meters: Count requests and connections.

        Raises:
            InvalidArgument: The tokens or the certificate can't be read.
        """
        self._config = config
        self.made_token: str | None = None
        """The token that was made because none is configured."""
        fixed: list[AccessToken] = []
        if config.http_token is not None:
            fixed.append(admin_token(config.http_token))
        elif config.http_tokens is None and config.http_make_token == "yes":
            self.made_token = new_token()
            fixed.append(admin_token(self.made_token, "made-at-start"))
        self._tokens = ValidTokens(tuple(fixed), config.http_tokens)
        self._tls = _tls(config)
        address = config.http_address()
        hosts = (*config.http_hosts, *([address[0]] if address else ()))
        origins = Origins(hosts, config.http_origins)
        self._context = HttpContext(
            monitoring, self._tokens, origins, connections=config.http_connections, meters=meters
        )
        if config.http_page != OFF:
            self._context.service = service
        self.address: str | None = None
        """Its URL, once it listens."""
        self.absence = OFF
        """Why it does not listen."""
        self._listener = HttpListener(
            HttpApp(self._context), tls=self._tls, connections=config.http_connections, meters=meters
        )

    @property
    def has_api(self) -> bool:
        """Whether there is more than metrics and health."""
        return self._tokens.are_configured

    @property
    def has_page(self) -> bool:
        """Whether there is the admin page."""
        return self.has_api and self._context.service is not None

    async def start(self) -> None:
        """Listen. If that is not possible, log why, and let the service run without HTTP."""
        address = self._config.http_address()
        if address is None:
            return
        try:
            host, port = await self._listener.start(*address)
        except OSError as error:
            is_taken = error.errno == errno.EADDRINUSE
            reason = "is taken" if is_taken else f"can't be listened on: {error.strerror or error}"
            self.absence = f"none: {self._config.http} {reason}"
            cure = "choose another with --http, as in --http 127.0.0.1:0"
            what = "no API, metrics and health" if self.has_api else "no metrics and health"
            logger.warning("%s: %s %s: %s", what, self._config.http, reason, cure)
            return
        self.address = address_url(host, port, "http" if self._tls is None else "https")
        if self.has_api and self._tls is None and not is_loopback(address[0]):
            logger.warning(
                "tokens and values travel unencrypted to %s: use --http-cert, a proxy with TLS, or --http 127.0.0.1:%d",
                self.address,
                port,
            )

    def opened(self, engine: Engine) -> None:
        """The database is open: the API answers from now on."""
        self._context.opened(engine)

    def serving(self, plugins: DatabaseService | None, semantic: SemanticService | None) -> None:
        """Hand requests to these services from now on; None while they don't run."""
        self._context.plugins.current = plugins
        self._context.semantic.current = semantic

    def reload_tokens(self) -> None:
        """Read the file of tokens again."""
        self._tokens.reload()

    def stop_accepting(self) -> None:
        """Accept no further requests; those that run are finished."""
        self._listener.stop_accepting()
        self._context.end_streams()

    async def aclose(self) -> None:
        self.stop_accepting()
        await self._listener.aclose()


def _tls(config: Config) -> ssl.SSLContext | None:
    if config.http_cert is None:
        return None
    try:
        return tls_context(config.http_cert, config.http_key)
    except OSError as error:
        if lacks_key(config.http_cert, config.http_key):
            raise InvalidArgument(
                f"--http-cert: {config.http_cert} has no private key; name it with --http-key"
            ) from None
        # The message of an SSLError only names a place in OpenSSL.
        raise InvalidArgument(
            f"--http-cert, --http-key: they are not a certificate and its private key in PEM, or can't be read: "
            f"{error.strerror or type(error).__name__}"
        ) from None
