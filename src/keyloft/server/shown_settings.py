"""The settings of a service as people may see them: without secrets."""

from typing import Any, Final

from keyloft.core.addresses import without_login
from keyloft.core.urls import DatabaseUrl
from keyloft.errors import KeyloftError
from keyloft.http.page.service import ShownSetting
from keyloft.server.config import SETTINGS, Config, Setting

SECRETS: Final = frozenset({"nats_password", "nats_token", "audit_key", "http_token"})
_MASK: Final = "•••••• (set)"


def shown_settings(config: Config) -> list[ShownSetting]:
    """All settings."""
    return [_shown(setting, getattr(config, setting.name)) for setting in SETTINGS.values()]


def _shown(setting: Setting, value: Any) -> ShownSetting:
    return ShownSetting(
        name=setting.name,
        value=_text(setting.name, value),
        is_default=value == setting.default,
        flag=setting.flag,
        environment=setting.environment,
        description=setting.description,
    )


def _text(name: str, value: Any) -> str:
    if value is None or value == ():
        return ""
    if name in SECRETS:
        return _MASK
    if name == "database":
        try:
            return DatabaseUrl.parse(value).shown
        except KeyloftError:
            return _MASK  # a URL that can't be parsed may have a password anywhere
    if name == "nats":
        return ", ".join([without_login(address) for address in value])
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:,.15g}" if isinstance(value, float) else str(value)
