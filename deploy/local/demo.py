"""`make demo`: one request through the whole chain, step by step."""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import aio_pika
import httpx

from deploy.local import environment
from deploy.local.errors import Interrupted, LocalStackError
from deploy.local.example import a_request
from deploy.local.machine.folders import LOCAL, Place, Report, claimed
from deploy.local.machine.ports import free_port
from deploy.local.machine.waiting import is_interrupted
from deploy.local.stack import is_ready, running_stack

_STEP_SECONDS = 30.0


def main(report: Report) -> None:
    """Follow one request through the running stack, or through one started for it."""
    with _stack(report) as variables:
        asyncio.run(follow_one_request(variables, report))


@contextmanager
def _stack(report: Report) -> Iterator[Mapping[str, str]]:
    running = environment.read(LOCAL / "env")
    if running and is_ready(running["BASE_URL"]):
        yield running
        return
    report("No stack is running, so this starts one, and stops it afterwards.")
    place = Place(folder=LOCAL / "demo", keep=False, report=report)
    ports = environment.Ports(api=free_port(), worker=free_port(), smtp=free_port())
    with claimed(LOCAL / "demo.lock"), running_stack(place, ports) as stack:
        yield stack.variables


async def follow_one_request(variables: Mapping[str, str], report: Report) -> None:
    """Send a request, wait for its e-mail, and calculate it as a calculation team does.

    Raises LocalStackError if a step does not happen in time.
    """
    headers = {"Authorization": f"Bearer {variables['ACCESS_TOKEN']}"}
    calculation_id = f"calc_{secrets.token_hex(8)}"
    async with httpx.AsyncClient(
        base_url=variables["BASE_URL"], headers=headers, timeout=_STEP_SECONDS, trust_env=False
    ) as http:
        response = await http.post("/v1/request", json=a_request())
        if response.status_code != httpx.codes.OK:
            raise LocalStackError(f"POST /v1/request answered {response.status_code}: {response.text[:300]}")
        request = response.json()["data"]
        report(f"stored: {request['uuid']}")

        async def is_mailed() -> bool:
            return any(request["request_url"] in mail for mail in _mails(variables))

        await _until("e-mailed", is_mailed)
        report(f"e-mailed: {request['customer_email']} has {request['request_url']}")

        await _send_calculation(variables["AMQP_URL"], request["uuid"], calculation_id)

        async def is_calculated() -> bool:
            shown = await http.get(f"/v1/request/{request['uuid']}")
            return bool(shown.json()["data"]["calculation_id"] == calculation_id)

        await _until("calculated", is_calculated)
        report(f"calculated: {calculation_id}")


def _mails(variables: Mapping[str, str]) -> list[str]:
    return [mail.read_text() for mail in Path(variables["MAIL_DIR"]).glob("*.eml")]


async def _send_calculation(amqp_url: str, uuid: str, calculation_id: str) -> None:
    calculation = {"request_uuid": uuid, "calculation_id": calculation_id}
    async with await aio_pika.connect(amqp_url) as broker, broker.channel(on_return_raises=True) as channel:
        exchange = await channel.get_exchange("calculations")
        message = aio_pika.Message(json.dumps(calculation).encode())
        await exchange.publish(message, "calculation.created", timeout=_STEP_SECONDS)


async def _until(step: str, condition: Callable[[], Awaitable[bool]]) -> None:
    try:
        async with asyncio.timeout(_STEP_SECONDS):
            while not await condition():
                if is_interrupted():
                    raise Interrupted
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise LocalStackError(f"It is not {step} within {_STEP_SECONDS:.0f} seconds.") from None
