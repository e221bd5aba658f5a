"""Tells the environment variables of settings from those that Kubernetes sets, and from mistyped ones."""

import difflib
import os
import re
from collections.abc import Collection, Mapping
from typing import Final

_NEAR: Final = 0.85
"""How similar a mistyped variable must be to a setting's."""
_OF_KUBERNETES: Final = re.compile(
    r"KEYLOFT_((.+_)?PORT=(tcp|udp|sctp)://.*"
    r"|(.+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*)",
    re.ASCII | re.DOTALL,
)
"""The variables that Kubernetes sets for services named keyloft, keyloft-nats and so on, unless a pod has
`enableServiceLinks: false`."""


def read_variable(environment: Mapping[str, str], name: str) -> str | None:
    """The value of an environment variable; None if it is absent or empty, or Kubernetes set it for a service."""
    value = environment.get(name)
    return None if not value or _is_of_kubernetes(name, value) else value


def _is_of_kubernetes(name: str, value: str) -> bool:
    return _OF_KUBERNETES.fullmatch(f"{name}={value}") is not None


def mistyped_variables(known: Collection[str], environment: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """Variables that resemble a known one and are none, each with the one that was probably meant."""
    unknown = [
        name
        for name, value in environment.items()
        if name.startswith("KEYLOFT_") and name not in known and not _is_of_kubernetes(name, value)
    ]
    return [(name, meant) for name in unknown if (meant := _meant(name, known)) is not None]


def _meant(name: str, known: Collection[str]) -> str | None:
    # KEYLOFT_NATS, named after the flag --nats, resembles KEYLOFT_NATS_CA more than KEYLOFT_NATS_URL.
    if f"{name}_URL" in known:
        return f"{name}_URL"
    return next(iter(difflib.get_close_matches(name, known, 1, _NEAR)), None)
