"""Rows of calculation_request in any number, made by Postgres itself."""

from service.postgres.pool import Connection
from tests.harness.examples import CONVEYANCER

OTHERS = ("a-firm-of-long-ago", *(f"firm-{number}" for number in range(19)))
EXTERNAL_IDS = 20  # of each conveyancer


async def fill(connection: Connection, *, rows: int) -> None:
    """Store requests a millisecond apart: the oldest are of OTHERS[0], the rest of twenty firms in turn."""
    await connection.execute(
        """
        INSERT INTO calculation_request (
               id, conveyancer_id, created_at, updated_at,
               customer_email, customer_first_name, customer_last_name,
               sender_email, sender_organization_name, sender_first_name, sender_last_name,
               case_ref, request_type, external_id, calculation_fee_exempt, secret_salt, secret_key_id)
        SELECT (lpad(to_hex(1700000000000 + number), 12, '0') || '7000' || '8'
                || right(md5(number::text), 15))::uuid,
               CASE WHEN number <= $1 / 20 THEN $2
                    WHEN number % 20 = 0 THEN $3
                    ELSE $4 || number % 20 - 1 END,
               made.at, made.at, 'customer-' || number || '@customer.example.com', 'Ada', 'Lovelace',
               'grace@firm.example.com', 'Hopper & Partners', 'Grace', 'Hopper',
               '12 High Street', 'SDLT_CALCULATION', 'case-' || number / 20 % $5, false,
               decode(md5(number::text), 'hex'), 'current'
          FROM generate_series(1, $1) AS number,
               LATERAL (SELECT to_timestamp(1700000000 + number / 1000) AS at) AS made
        """,
        rows,
        OTHERS[0],
        CONVEYANCER,
        "firm-",
        EXTERNAL_IDS,
    )
    await connection.execute("VACUUM ANALYZE calculation_request")
