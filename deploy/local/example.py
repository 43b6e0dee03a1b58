"""The request that `make run` prints and `make demo` sends."""

import json
from typing import Any


def a_request(customer_email: str = "jane.doe@example.com") -> dict[str, Any]:
    """Return the body of a request for a calculation."""
    return {
        "customer_email": customer_email,
        "customer_first_name": "Jane",
        "customer_last_name": "Doe",
        "sender_email": "sam.smith@example.com",
        "sender_organization_name": "Demo Conveyancing",
        "sender_first_name": "Sam",
        "sender_last_name": "Smith",
        "case_ref": "CASE-1",
        "property_value": 300_000,
    }


def commands(env_file: str, mail_folder: str) -> str:
    """Return commands to copy: create a request, retrieve it, read the e-mail, get the questionnaire."""
    body = json.dumps(a_request())
    return f"""\
  . {env_file}

  # create a request
  created=$(curl -sS "$BASE_URL/v1/request" -H "Authorization: Bearer $ACCESS_TOKEN" \\
       -H 'Content-Type: application/json' -d '{body}')
  printf '%s\\n' "$created"

  # retrieve it
  curl -sS "$BASE_URL/v1/request/$(printf '%s' "$created" | grep -o 'req_[0-9A-Za-z]*' | head -1)" \\
       -H "Authorization: Bearer $ACCESS_TOKEN"

  # the questionnaire
  curl -sS "$BASE_URL/v1/questionnaire/structure" -H "Authorization: Bearer $API_KEY"

  # the e-mail to its customer
  sleep 1; cat "$(ls {mail_folder}/*.eml | tail -1)"
"""
