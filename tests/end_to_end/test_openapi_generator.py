"""openapi-generator makes clients from the OpenAPI document, in languages that check types, and they work."""

import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import msgspec
import pytest

from deploy.local.machine.folders import LOCAL
from service import app
from tests.harness import stored
from tests.harness.examples import A_REQUEST
from tests.harness.processes import started

pytestmark = pytest.mark.long

# Each makes the calls that its third argument names, and prints what it got.
PYTHON = """
import json, sys
import openapi_client as api

base_url, token, calls, sent = sys.argv[1:]
with api.ApiClient(api.Configuration(host=base_url, access_token=token)) as client:
    requests = api.RequestsApi(client)
    if calls == "events":
        got = [requests.list_events(sent)]
        events = [event.actual_instance for event in got[0].data.events]
        got += [event.data.reason for event in events if isinstance(event, api.CloudEventRequestEmailFailed)]
    else:
        created = requests.create_request(api.CreateBody.from_json(sent), idempotency_key="key")
        read = requests.retrieve_request(created.data.uuid)
        got = [created, read, api.QuestionnaireApi(client).questionnaire_structure()]
        try:
            requests.retrieve_request("nonsense")
        except api.exceptions.NotFoundException as refused:
            got.append(refused.data)
print(json.dumps(got, default=lambda each: each.to_dict() if hasattr(each, "to_dict") else str(each)))
"""
JAVA = """
import java.util.*;
import org.openapitools.client.*;
import org.openapitools.client.api.*;
import org.openapitools.client.model.*;

class Calls {
    public static void main(String[] sent) throws Exception {
        var client = new ApiClient();
        client.updateBaseUri(sent[0]);
        client.setRequestInterceptor(request -> request.header("Authorization", "Bearer " + sent[1]));
        var json = client.getObjectMapper();
        var requests = new RequestsApi(client);
        var got = new ArrayList<Object>();
        if (sent[2].equals("events")) {
            EnvelopeCalculationRequestEvents events = requests.listEvents(sent[3], null, null);
            got.add(events);
            for (var event : events.getData().getEvents())
                if (event.getActualInstance() instanceof CloudEventRequestEmailFailed failed)
                    got.add(failed.getData().getReason());
        } else {
            var body = json.readValue(sent[3], CreateBody.class);
            EnvelopeCalculationRequestView created = requests.createRequest(body, "key", null, null);
            String uuid = created.getData().getUuid();
            EnvelopeRetrievedCalculationRequest read = requests.retrieveRequest(uuid, null, null);
            got.addAll(List.of(created, read));
            got.add(new QuestionnaireApi(client).questionnaireStructure(null, null, null));
            try {
                requests.retrieveRequest("nonsense", null, null);
            } catch (ApiException refused) {
                got.add(json.readValue(refused.getResponseBody(), ErrorEnvelope.class));
            }
        }
        System.out.println(json.writeValueAsString(got));
    }
}
"""
TYPESCRIPT = """
import * as api from "./index";

async function call(basePath: string, accessToken: string, calls: string, sent: string): Promise<unknown[]> {
    const configuration = new api.Configuration({ basePath, accessToken });
    const requests = new api.RequestsApi(configuration);
    if (calls === "events") {
        const events = await requests.listEvents({ uuid: sent });
        const failed = events.data.events.flatMap((e) => (e.type === "request.email_failed" ? [e.data] : []));
        // @ts-expect-error: only the data of request.calculated has it.
        failed.map((data) => data.calculationId);
        return [api.EnvelopeCalculationRequestEventsToJSON(events), ...failed.map((data) => data.reason)];
    }
    const createBody: api.CreateBody = api.CreateBodyFromJSON(JSON.parse(sent));
    const created = await requests.createRequest({ createBody, idempotencyKey: "key" });
    const uuid: string = created.data.uuid;
    const read = await requests.retrieveRequest({ uuid });
    const questions = await new api.QuestionnaireApi(configuration).questionnaireStructure();
    const refused: Response = await requests.retrieveRequest({ uuid: "nonsense" }).catch((e) => e.response);
    const error: api.ErrorEnvelope = api.ErrorEnvelopeFromJSON(await refused.json());
    return [
        api.EnvelopeCalculationRequestViewToJSON(created),
        api.EnvelopeRetrievedCalculationRequestToJSON(read),
        api.EnvelopeQuestionnaireStructureToJSON(questions),
        api.ErrorEnvelopeToJSON(error),
    ];
}
const [basePath, accessToken, calls, sent] = process.argv.slice(2);
call(basePath, accessToken, calls, sent).then((got) => console.log(JSON.stringify(got)));
"""
# The only annotation of the generated code that the generator's archive lacks.
GENERATED = """
package javax.annotation;
public @interface Generated { String value(); String date() default ""; String comments() default ""; }
"""
BODY = A_REQUEST | {"property_value": 300_000, "meta_data": {"source": "website"}}


@pytest.fixture(scope="module")
def jar():
    """The archive of openapi-generator. It also has the libraries that the generated Java uses."""
    reason = "openapi-generator is installed by `make test-long`"
    pytest.importorskip("openapi_generator_cli", reason=reason)
    if not (shutil.which("java") and shutil.which("javac")):
        pytest.skip("Java is not installed")
    with resources.as_file(resources.files("openapi_generator_cli") / "openapi-generator.jar") as archive:
        yield str(archive)


def in_python(folder: Path, jar: str) -> list[str]:
    """Generate a client; return the command that calls the API with it."""
    generate(folder, jar, "python")
    (folder / "calls.py").write_text(PYTHON)
    return [sys.executable, "calls.py"]


def in_java(folder: Path, jar: str) -> list[str]:
    """Generate a client, and compile it; return the command that calls the API with it."""
    # Without the lookup, the client finds that an event is another event, too, and refuses it.
    options = "openApiNullable=false,useOneOfDiscriminatorLookup=true"
    generate(folder, jar, "java", "--library", "native", "--additional-properties", options)
    (folder / "Calls.java").write_text(JAVA)
    (folder / "Generated.java").write_text(GENERATED)
    sources = [str(source) for source in folder.rglob("*.java") if "test" not in source.parts]
    run(folder, "javac", "-proc:none", "-nowarn", "-cp", jar, "-d", "classes", *sources)
    return ["java", "-cp", f"classes{os.pathsep}{jar}", "Calls"]


def in_typescript(folder: Path, jar: str) -> list[str]:
    """Generate a client, and compile it; return the command that calls the API with it."""
    compiler = LOCAL / "node/node_modules/typescript/bin/tsc"
    if not (shutil.which("node") and compiler.exists()):
        pytest.skip("TypeScript is not installed")
    generate(folder, jar, "typescript-fetch")
    (folder / "calls.ts").write_text(f"declare const process: {{ argv: string[] }};{TYPESCRIPT}")
    run(folder, "node", str(compiler), "--strict", "--target", "es2022", "--module", "commonjs", "calls.ts")
    return ["node", "calls.js"]


def generate(folder: Path, jar: str, *options: str) -> None:
    (folder / "openapi.json").write_bytes(msgspec.json.encode(app.describe()))
    run(folder, "java", "-jar", jar, "generate", "-i", "openapi.json", "-o", ".", "-g", *options)


def run(folder: Path, *command: str) -> str:
    """Run a command to its end; return what it printed."""
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.fixture(scope="module", params=[in_python, in_java, in_typescript])
def call(request, tmp_path_factory, jar):
    """Runs the program of a client, which is made once, with these arguments; returns what it printed."""
    folder = tmp_path_factory.mktemp("client")
    command = request.param(folder, jar)
    return lambda *arguments: msgspec.json.decode(run(folder, *command, *arguments))


async def test_client_made_by_openapi_generator_creates_reads_and_gets_errors(call, api, issuer):
    async with started(api):
        body = msgspec.json.encode(BODY).decode()
        created, read, questions, error = call(api.base_url, issuer.token(), "requests", body)

    assert created["data"].items() >= BODY.items()
    assert created["errors"] is None
    assert read["data"] == created["data"]
    assert questions["data"]["questionnaire"][0]["ref"] == "case_ref"
    assert error["data"] is None
    assert [each["code"] for each in error["errors"]] == ["not_found"]


async def test_client_made_by_openapi_generator_narrows_an_event_by_its_type(
    call, api, issuer, caller, database
):
    request = await stored.insert_with_each_event(database)
    async with started(api):
        sent = (await caller.get(f"/v1/request/{request.uuid}/events")).json()
        got, reason = call(api.base_url, issuer.token(), "events", request.uuid)

    for event, each in zip(got["data"]["events"], sent["data"]["events"], strict=True):
        assert (event["type"], event["data"]) == (each["type"], each["data"])
    assert reason == "refused"
