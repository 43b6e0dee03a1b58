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
from tests.harness.examples import A_REQUEST
from tests.harness.processes import started

pytestmark = pytest.mark.long

# Each prints what it got: the request as created and as read, its events, the questions, and an error.
PYTHON = """
import json, sys
import openapi_client as api

base_url, token, body = sys.argv[1:]
with api.ApiClient(api.Configuration(host=base_url, access_token=token)) as client:
    requests = api.RequestsApi(client)
    created = requests.create_request(api.CreateBody.from_json(body), idempotency_key="key")
    read = requests.retrieve_request(created.data.uuid)
    events = requests.list_events(created.data.uuid)
    questions = api.QuestionnaireApi(client).questionnaire_structure()
    try:
        requests.retrieve_request("nonsense")
    except api.exceptions.NotFoundException as refused:
        error = refused.data
print(json.dumps([each.to_dict() for each in (created, read, events, questions, error)], default=str))
"""
JAVA = """
import java.util.List;
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
        var body = json.readValue(sent[2], CreateBody.class);
        EnvelopeCalculationRequestView created = requests.createRequest(body, "key", null, null);
        String uuid = created.getData().getUuid();
        EnvelopeRetrievedCalculationRequest read = requests.retrieveRequest(uuid, null, null);
        EnvelopeCalculationRequestEvents events = requests.listEvents(uuid, null, null);
        var questions = new QuestionnaireApi(client).questionnaireStructure(null, null, null);
        ErrorEnvelope error = null;
        try {
            requests.retrieveRequest("nonsense", null, null);
        } catch (ApiException refused) {
            error = json.readValue(refused.getResponseBody(), ErrorEnvelope.class);
        }
        System.out.println(json.writeValueAsString(List.of(created, read, events, questions, error)));
    }
}
"""
TYPESCRIPT = """
import * as api from "./index";

async function call(basePath: string, accessToken: string, body: string): Promise<object[]> {
    const configuration = new api.Configuration({ basePath, accessToken });
    const requests = new api.RequestsApi(configuration);
    const createBody: api.CreateBody = api.CreateBodyFromJSON(JSON.parse(body));
    const created = await requests.createRequest({ createBody, idempotencyKey: "key" });
    const uuid: string = created.data.uuid;
    const read = await requests.retrieveRequest({ uuid });
    const events = await requests.listEvents({ uuid });
    const questions = await new api.QuestionnaireApi(configuration).questionnaireStructure();
    const refused: Response = await requests.retrieveRequest({ uuid: "nonsense" }).catch((e) => e.response);
    const error: api.ErrorEnvelope = api.ErrorEnvelopeFromJSON(await refused.json());
    return [
        api.EnvelopeCalculationRequestViewToJSON(created),
        api.EnvelopeRetrievedCalculationRequestToJSON(read),
        api.EnvelopeCalculationRequestEventsToJSON(events),
        api.EnvelopeQuestionnaireStructureToJSON(questions),
        api.ErrorEnvelopeToJSON(error),
    ];
}
call(process.argv[2], process.argv[3], process.argv[4]).then((got) => console.log(JSON.stringify(got)));
"""
# The only annotation of the generated code that the generator's archive lacks.
GENERATED = """
package javax.annotation;
public @interface Generated { String value(); String date() default ""; String comments() default ""; }
"""
BODY = A_REQUEST | {"property_value": 300_000, "meta_data": {"source": "website"}}


@pytest.fixture
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
    generate(folder, jar, "java", "--library", "native", "--additional-properties", "openApiNullable=false")
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


@pytest.mark.parametrize("language", [in_python, in_java, in_typescript])
async def test_client_made_by_openapi_generator_creates_reads_and_gets_errors(
    language, tmp_path, jar, api, issuer
):
    command = language(tmp_path, jar)
    async with started(api):
        printed = run(tmp_path, *command, api.base_url, issuer.token(), msgspec.json.encode(BODY).decode())

    created, read, events, questions, error = msgspec.json.decode(printed)
    assert created["data"].items() >= BODY.items()
    assert created["errors"] is None
    assert read["data"] == created["data"]
    assert [event["type"] for event in events["data"]["events"]] == ["request.created"]
    assert questions["data"]["questionnaire"][0]["ref"] == "case_ref"
    assert error["data"] is None
    assert [each["code"] for each in error["errors"]] == ["not_found"]
