"""The e-mails of a request after the first one, which request.created brings about."""

from collections.abc import Sequence
from uuid import UUID

from service.postgres.pool import Connection


async def add_again(connection: Connection, request_ids: Sequence[UUID]) -> set[UUID]:
    """Record that another e-mail is to be sent for each of these requests, in the caller's transaction.

    Returns those for which one is: not those with a pending e-mail, nor those with none yet.

    The key of an e-mail, from which its Message-ID is made, is that of the first one and a number from 2 on.
    """
    rows = await connection.fetch(
        """
        INSERT INTO email (event_id, request_id)
        SELECT min(event_id) || '.' || (count(*) + 1), request_id
          FROM email
         WHERE request_id = ANY($1)
         GROUP BY request_id
        HAVING bool_and(state <> 'pending')
         ORDER BY request_id -- or two operators with the same requests could deadlock
        ON CONFLICT (event_id) DO NOTHING
        RETURNING request_id
        """,
        request_ids,
    )
    return {row["request_id"] for row in rows}
