"""The steps of a request after it was stored: its e-mail and its calculation."""

from service.calculation_requests.model import CalculationRequest
from service.postgres.pool import Connection
from tests.harness.in_process import running
from tests.harness.mail_server import MailServer
from tests.harness.waiting import eventually
from tests.worker import deliveries
from worker.mail import ledger
from worker.mail.ledger import Intent
from worker.mail.postman import Postman


async def intend(database: Connection, request: CalculationRequest) -> None:
    """Enter the e-mail of a request in the ledger."""
    await ledger.add(database, [Intent(f"{request.uuid}.request.created.1", request.id)])


async def intend_another(database: Connection, request: CalculationRequest) -> None:
    """Enter another e-mail of a request in the ledger, under the id of another event."""
    await ledger.add(database, [Intent(f"{request.uuid}.another", request.id)])


async def attempt_emails(database: Connection, postman: Postman) -> None:
    """Attempt to send every e-mail once."""
    async with running(postman.run):
        await eventually(lambda: database.fetchval("SELECT bool_and(attempts > 0) FROM email"))


async def refuse_email(
    database: Connection, postman: Postman, mail_server: MailServer, request: CalculationRequest
) -> None:
    """Attempt the e-mail of a request, which the mail server refuses for good."""
    mail_server.rcpt_reply = "550 5.1.1 no such user"
    await intend(database, request)
    await attempt_emails(database, postman)


async def send_another_email(
    database: Connection, postman: Postman, mail_server: MailServer, request: CalculationRequest
) -> None:
    """Send another e-mail of a request, which the mail server accepts."""
    mail_server.rcpt_reply = "250 OK"
    await intend_another(database, request)
    await attempt_emails(database, postman)


async def calculate(database: Connection, request: CalculationRequest) -> None:
    """Record a calculation, as its consumer does."""
    await deliveries.calculate(database, request.uuid, "C-1")
