"""The API's documentation of each field, written once for request bodies and responses."""

from msgspec import Meta

META_DATA_BYTES = 16 * 1024
META_DATA_DEPTH = 16
REASON_CHARACTERS = 500

_ONE_ADDRESS = "one recipient, in ASCII before the @, without encoded words (`=?…?=`)."

CUSTOMER_EMAIL = Meta(
    description=f"E-mail address of the client who asks for the calculation: {_ONE_ADDRESS}",
    examples=["ada@customer.example.com"],
)
NEW_CUSTOMER_EMAIL = Meta(
    description=f"Another address of the client: {_ONE_ADDRESS} Null, or left out: the address stays.",
    examples=["ada@customer.example.com"],
)
CUSTOMER_PHONE = Meta(
    description="Phone number of the client, in any form. Empty is stored as null.",
    examples=["+44 20 7946 0000"],
)
CUSTOMER_FIRST_NAME = Meta(examples=["Ada"])
CUSTOMER_LAST_NAME = Meta(examples=["Lovelace"])
SENDER_EMAIL = Meta(
    description=f"E-mail address of the person or organization that sends the request: {_ONE_ADDRESS}",
    examples=["grace@firm.example.com"],
)
SENDER_ORGANIZATION_NAME = Meta(examples=["Hopper & Partners"])
SENDER_FIRST_NAME = Meta(examples=["Grace"])
SENDER_LAST_NAME = Meta(examples=["Hopper"])
CASE_REF = Meta(description="The sender's own reference of the case.", examples=["12 High Street"])
REQUEST_TYPE = Meta(description="The only type, and the default.", examples=["SDLT_CALCULATION"])
PROPERTY_VALUE = Meta(description="In pounds.", examples=[300_000])
NOTES = Meta(
    description="Internal notes; may have several lines. Empty is stored as null.",
    examples=["Call before noon.\nCompletion is in May."],
)
EXTERNAL_ID = Meta(
    description="Identifier in the caller's own system. Empty is stored as null.", examples=["crm-17"]
)
META_DATA = Meta(
    description=f"Arbitrary data: at most {META_DATA_BYTES} bytes of JSON and {META_DATA_DEPTH} levels. "
    "Numbers must be within the range of int64.",
    examples=[{"source": "website", "campaign": {"id": 7, "tags": ["spring", "first-time"]}}],
    extra_json_schema={"additionalProperties": True},
)
CALCULATION_FEE_EXEMPT = Meta(
    description="Waives the conveyancer's calculation fee; only at creation. The default is false. Stored as "
    "false when the conveyancer charges no fee.",
    examples=[True],
)
CALCULATION_FEE_EXEMPT_REASON = Meta(
    description="Required when the fee is waived, otherwise ignored: at most "
    f"{REASON_CHARACTERS} characters.",
    examples=["Repeat client"],
)

# Only in responses.
UUID = Meta(examples=["req_01a9ZkW3mT6qPxB8vNcR4d"], extra_json_schema={"pattern": "^req_[0-9A-Za-z]{22}$"})
CALCULATION_ID = Meta(description="Null until a calculation has been made.")
SECRET = Meta(description="Opens this request and its calculation: send it as the Bearer token.")
REQUEST_URL = Meta(description="Where the customer answers the questions; the same link as in the e-mail.")
URI = Meta(extra_json_schema={"format": "uri"})
