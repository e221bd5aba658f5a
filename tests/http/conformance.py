"""Random requests by an OpenAPI document to a running server: every answer is one that the document describes."""

import asyncio
from typing import Any

import requests
from hypothesis import HealthCheck, Phase, given

from tests.support.examples import examples


async def check_answers(document: dict[str, Any], url: str, token: str, usual: int) -> list[str]:
    """Send so many requests per operation that the document allows, and as many with a body that it does not.

    Args:
        document: Describes requests and answers.
        url: What stands before its paths.
        token: For the requests.
        usual: How many examples a usual run tries.

    Returns:
        The operations.
    """
    return await asyncio.to_thread(_check, document, url, token, usual)  # the server is in this event loop


def _check(document: dict[str, Any], url: str, token: str, usual: int) -> list[str]:
    # Here, because every worker of a run imports this module, and few use it.
    import schemathesis.openapi
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    expected = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]
    checked = []
    with requests.Session() as session:
        found: Any
        for found in schemathesis.openapi.from_dict(document).get_all_operations():
            operation = found.ok()
            # Only a body can be wrong in enough ways.
            modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if operation.body else [])]
            for mode in modes:

                @examples(
                    usual,
                    deadline=None,
                    database=None,
                    phases=[Phase.generate],
                    suppress_health_check=list(HealthCheck),
                )
                @given(operation.as_strategy(mode))
                def send(case: Any) -> None:
                    headers = {"authorization": f"Bearer {token}"}
                    response = case.call(base_url=url, session=session, headers=headers, timeout=30)
                    case.validate_response(response, checks=expected)

                send()
            checked.append(operation.label)
    return checked
