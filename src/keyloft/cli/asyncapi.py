"""The command `asyncapi`: prints a description of the services on NATS that programs can read."""

from typing import Final

from keyloft.cli.nats_config import Subjects
from keyloft.cli.options import Commands
from keyloft.cli.terminal import say


def asyncapi(*, subjects: Subjects) -> None:
    """Print the AsyncAPI 3 document of the services on NATS. It has the subjects, and JSON Schemas of all messages.

    Generators make clients and documents from it, and validators check messages by it. Of several --prefixes, it has
    the first.

    Example: keyloft asyncapi > keyloft.json
    """
    import json

    from keyloft.server.asyncapi import document

    settings = subjects.config()
    say(json.dumps(document(settings.prefixes[0], settings.semantic_prefix), indent=2))


COMMANDS: Final[Commands] = (asyncapi,)
