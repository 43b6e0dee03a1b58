"""Programs of a firm in three languages: they call the API with a generated client, and print the answers."""

PYTHON = """
import json
import sys

from calculations_client import AuthenticatedClient
from calculations_client.api.questionnaire import questionnaire_structure
from calculations_client.api.requests import create_request, list_events, read_feed, retrieve_request
from calculations_client.models import CreateBody, FieldError, RequestEmailFailedEvent
from calculations_client.types import UNSET

base_url, token, sent, uuid = sys.argv[1:]
body = CreateBody.from_dict(json.loads(sent))
wrong = CreateBody.from_dict(json.loads(sent) | {"customer_email": "ada"})


def read_on(after):
    # Read the feed to its end, in a new client, as after a restart, from what the last one kept.
    with AuthenticatedClient(base_url=base_url, token=token) as client:
        while (page := read_feed.sync(client=client, limit=2, after=after).data).more:
            ids.extend(event.id for event in page.events)
            after = page.after
        ids.extend(event.id for event in page.events)
        return page.after


ids = []
after = read_on(UNSET)
with AuthenticatedClient(base_url=base_url, token=token) as client:
    created, repeated, another = [
        create_request.sync_detailed(client=client, body=body, idempotency_key=key)
        for key in ("key", "key", "another-key")
    ]
    read = retrieve_request.sync(created.parsed.data.uuid, client=client)
    questions = questionnaire_structure.sync(client=client)
    events = list_events.sync(uuid, client=client)
    error = create_request.sync(client=client, body=wrong)
read_on(after)
assert created.parsed.data == repeated.parsed.data != another.parsed.data
replayed = [each.headers.get("Idempotent-Replayed") for each in (created, repeated, another)]
assert replayed == [None, "true", None]
assert created.parsed.data.created_at.utcoffset() is not None
later = {"code": "added_later", "message": "", "field": None, "pointer": None}
assert FieldError.from_dict(later).code == "added_later"
failed = [event for event in events.data.events if isinstance(event, RequestEmailFailedEvent)]
answers = [each.to_dict() for each in (created.parsed, read, questions, events, error)]
kinds = [type(event).__name__ for event in events.data.events]
print(json.dumps([*answers, *(event.data.reason for event in failed), ids, kinds]))
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
        var requests = new RequestsApi(client);
        var json = client.getObjectMapper();
        CreateBody body = json.readValue(sent[2], CreateBody.class);
        EnvelopeCalculationRequestView created = requests.createRequest(body, "key");
        String uuid = created.getData().getUuid();
        EnvelopeRetrievedCalculationRequest read = requests.retrieveRequest(uuid);
        var questions = new QuestionnaireApi(client).questionnaireStructure(null);
        EnvelopeCalculationRequestEvents events = requests.listEvents(sent[3]);
        var got = new ArrayList<Object>(List.of(created, read, questions, events));
        try {
            requests.createRequest(new CreateBody(), null);
        } catch (ApiException refused) {
            got.add(json.readValue(refused.getResponseBody(), ErrorEnvelope.class));
        }
        for (var event : events.getData().getEvents())
            if (event.getActualInstance() instanceof CloudEventRequestEmailFailed failed)
                got.add(failed.getData().getReason());
        System.out.println(json.writeValueAsString(got));
    }
}
"""
TYPESCRIPT = """
import * as api from "./index";

const [basePath, accessToken, sent, uuid] = process.argv.slice(2);
const configuration = new api.Configuration({ basePath, accessToken });
const requests = new api.RequestsApi(configuration);

async function callEach(): Promise<unknown[]> {
    const createBody: api.CreateBody = api.CreateBodyFromJSON(JSON.parse(sent));
    const created = await requests.createRequest({ createBody, idempotencyKey: "key" });
    const read = await requests.retrieveRequest({ uuid: created.data.uuid });
    const questions = await new api.QuestionnaireApi(configuration).questionnaireStructure();
    const events = await requests.listEvents({ uuid });
    const empty = { createBody: api.CreateBodyFromJSON({}) };
    const refused: Response = await requests.createRequest(empty).catch((error) => error.response);
    const error: api.ErrorEnvelope = api.ErrorEnvelopeFromJSON(await refused.json());
    const reasons = events.data.events.flatMap((event: api.CloudEventRequestEvent): unknown[] => {
        // @ts-expect-error: only the data of request.calculated has it.
        if (event.type === "request.withdrawn") event.data.calculationId;
        return event.type === "request.email_failed" ? [event.data.reason] : [];
    });
    return [
        api.EnvelopeCalculationRequestViewToJSON(created),
        api.EnvelopeRetrievedCalculationRequestToJSON(read),
        api.EnvelopeQuestionnaireStructureToJSON(questions),
        api.EnvelopeCalculationRequestEventsToJSON(events),
        api.ErrorEnvelopeToJSON(error),
        ...reasons,
    ];
}
callEach().then((got) => console.log(JSON.stringify(got)));
"""
# The only annotation of the generated code that the generator's archive lacks.
GENERATED = """
package javax.annotation;
public @interface Generated { String value(); String date() default ""; String comments() default ""; }
"""
