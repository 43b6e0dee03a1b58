"""Programs of a firm in three languages, which call the API with a client made by openapi-generator.

Each makes the calls that its third argument names, and prints what it got. `walk` and `restart` read the
feed as service/README.md says, and call again after a 503. The test bounds their time.
"""

PYTHON = """
import json, sys, time
import openapi_client as api, urllib3

base_url, token, calls, sent = sys.argv[1:]
retries = urllib3.Retry(5, allowed_methods=None)  # also after 503, at the time in Retry-After
client = api.ApiClient(api.Configuration(host=base_url, access_token=token, retries=retries))
requests = api.RequestsApi(client)
after, ids, events = None, [], []

def read_until(awaited):
    global after
    page = None
    while page is None or page.more or not any(isinstance(event, awaited) for event in events):
        page = requests.read_feed(after, 2).data
        new = [event.actual_instance for event in page.events if event.actual_instance.id not in ids]
        events.extend(new)
        ids.extend(event.id for event in new)
        after = page.after
        time.sleep(0.1)

if calls == "events":
    got = [requests.list_events(sent)]
elif calls == "walk":
    created = requests.create_request(api.CreateBody.from_json(sent), idempotency_key="key")
    uuid = created.data.uuid
    got = [created, requests.retrieve_request(uuid), api.QuestionnaireApi(client).questionnaire_structure()]
    read_until(api.CloudEventRequestEmailFailed)
    requests.send_email(uuid, api.EmailBody(customer_email="ada@customer.example.com"))
    read_until(api.CloudEventRequestEmailSent)
    try:
        requests.send_email(uuid, api.EmailBody())
    except api.exceptions.ConflictException as refused:
        got += [refused.data, refused.headers["Retry-After"]]
    got += [event.data.reason for event in events if isinstance(event, api.CloudEventRequestEmailFailed)]
    got += [event.data.changed for event in events if isinstance(event, api.CloudEventRequestCorrected)]
    got += [event.data.email for event in events if isinstance(event, api.CloudEventRequestEmailSent)]
    another = requests.create_request(api.CreateBody.from_json(sent), idempotency_key="another-key")
    got += [another.data.uuid, after, ids]
else:
    uuid, after, ids = json.loads(sent)
    requests.withdraw_request(uuid)
    read_until(api.CloudEventRequestWithdrawn)
    got = ids
print(json.dumps(got, default=lambda each: each.to_dict() if hasattr(each, "to_dict") else str(each)))
"""
JAVA = """
import com.fasterxml.jackson.databind.ObjectMapper;
import java.util.*;
import java.util.concurrent.Callable;
import org.openapitools.client.*;
import org.openapitools.client.api.*;
import org.openapitools.client.model.*;

class Calls {
    static ApiClient client = new ApiClient();
    static ObjectMapper json = client.getObjectMapper();
    static RequestsApi requests;
    static String after;
    static Set<String> ids = new LinkedHashSet<>();
    static List<Object> events = new ArrayList<>();

    static <T> T patiently(Callable<T> call) throws Exception {
        while (true)
            try {
                return call.call();
            } catch (ApiException refused) {
                if (refused.getCode() != 503) throw refused;
                Thread.sleep(1000 * refused.getResponseHeaders().firstValueAsLong("Retry-After").getAsLong());
            }
    }

    static void readUntil(Class<?> awaited) throws Exception {
        EventPage page = null;
        while (page == null || page.getMore() || events.stream().noneMatch(awaited::isInstance)) {
            page = patiently(() -> requests.readFeed(after, 2)).getData();
            for (var event : page.getEvents())
                // Events of all types have an id, but the class of their union has no getter for it.
                if (ids.add(json.valueToTree(event).get("id").asText()))
                    events.add(event.getActualInstance());
            after = page.getAfter();
            Thread.sleep(100);
        }
    }

    public static void main(String[] sent) throws Exception {
        client.updateBaseUri(sent[0]);
        client.setRequestInterceptor(request -> request.header("Authorization", "Bearer " + sent[1]));
        requests = new RequestsApi(client);
        var got = new ArrayList<Object>();
        if (sent[2].equals("events")) {
            EnvelopeCalculationRequestEvents events = requests.listEvents(sent[3]);
            got.add(events);
        } else if (sent[2].equals("walk")) {
            var body = json.readValue(sent[3], CreateBody.class);
            EnvelopeCalculationRequestView created = requests.createRequest(body, "key");
            String uuid = created.getData().getUuid();
            EnvelopeRetrievedCalculationRequest read = requests.retrieveRequest(uuid);
            var questions = new QuestionnaireApi(client).questionnaireStructure(null);
            got.addAll(List.of(created, read, questions));
            readUntil(CloudEventRequestEmailFailed.class);
            var right = new EmailBody().customerEmail("ada@customer.example.com");
            patiently(() -> requests.sendEmail(uuid, right));
            readUntil(CloudEventRequestEmailSent.class);
            try {
                patiently(() -> requests.sendEmail(uuid, new EmailBody()));
            } catch (ApiException refused) {
                got.add(json.readValue(refused.getResponseBody(), ErrorEnvelope.class));
                got.add(refused.getResponseHeaders().firstValue("Retry-After").get());
            }
            for (var event : events)
                if (event instanceof CloudEventRequestEmailFailed e) got.add(e.getData().getReason());
                else if (event instanceof CloudEventRequestCorrected e) got.add(e.getData().getChanged());
                else if (event instanceof CloudEventRequestEmailSent e) got.add(e.getData().getEmail());
            got.add(requests.createRequest(body, "another-key").getData().getUuid());
            got.addAll(List.of(after, ids));
        } else {
            var kept = json.readTree(sent[3]);
            after = kept.get(1).textValue();
            kept.get(2).forEach(id -> ids.add(id.asText()));
            patiently(() -> requests.withdrawRequest(kept.get(0).asText()));
            readUntil(CloudEventRequestWithdrawn.class);
            got.addAll(ids);
        }
        System.out.println(json.writeValueAsString(got));
    }
}
"""
TYPESCRIPT = """
import * as api from "./index";

const [basePath, accessToken, calls, sent] = process.argv.slice(2);
const pause = (seconds: number) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
const patience: api.Middleware = {
    async post({ response, fetch, url, init }) {
        if (response.status !== 503) return response;
        await pause(Number(response.headers.get("Retry-After")));
        return fetch(url, init);
    },
};
const configuration = new api.Configuration({ basePath, accessToken, middleware: [patience] });
const requests = new api.RequestsApi(configuration);
const events: api.CloudEventRequestEvent[] = [];
let after: string | undefined;
let ids: string[] = [];

async function readUntil(awaited: api.CloudEventRequestEvent["type"]): Promise<void> {
    let page: api.EventPage | undefined;
    while (!page || page.more || !events.some((event) => event.type === awaited)) {
        page = (await requests.readFeed({ after, limit: 2 })).data;
        const fresh = page.events.filter((event) => !ids.includes(event.id));
        events.push(...fresh);
        ids.push(...fresh.map((event) => event.id));
        after = page.after;
        await pause(0.1);
    }
}
async function call(): Promise<unknown[]> {
    if (calls === "events") {
        return [api.EnvelopeCalculationRequestEventsToJSON(await requests.listEvents({ uuid: sent }))];
    }
    if (calls === "restart") {
        const [uuid, ...kept] = JSON.parse(sent);
        [after, ids] = kept;
        await requests.withdrawRequest({ uuid });
        await readUntil("request.withdrawn");
        return ids;
    }
    const createBody: api.CreateBody = api.CreateBodyFromJSON(JSON.parse(sent));
    const created = await requests.createRequest({ createBody, idempotencyKey: "key" });
    const uuid: string = created.data.uuid;
    const read = await requests.retrieveRequest({ uuid });
    const questions = await new api.QuestionnaireApi(configuration).questionnaireStructure();
    await readUntil("request.email_failed");
    await requests.sendEmail({ uuid, emailBody: { customerEmail: "ada@customer.example.com" } });
    await readUntil("request.email_sent");
    const refused: Response = await requests.sendEmail({ uuid, emailBody: {} }).catch((e) => e.response);
    const error: api.ErrorEnvelope = api.ErrorEnvelopeFromJSON(await refused.json());
    const facts = events.flatMap((event): unknown[] => {
        if (event.type === "request.email_failed") return [event.data.reason];
        if (event.type === "request.corrected") return [event.data.changed];
        // @ts-expect-error: only the data of request.calculated has it.
        if (event.type === "request.withdrawn") return [event.data.calculationId];
        return event.type === "request.email_sent" ? [event.data.email] : [];
    });
    const another = await requests.createRequest({ createBody, idempotencyKey: "another-key" });
    return [
        api.EnvelopeCalculationRequestViewToJSON(created),
        api.EnvelopeRetrievedCalculationRequestToJSON(read),
        api.EnvelopeQuestionnaireStructureToJSON(questions),
        api.ErrorEnvelopeToJSON(error),
        refused.headers.get("Retry-After"),
        ...facts,
        another.data.uuid,
        after,
        ids,
    ];
}
call().then((got) => console.log(JSON.stringify(got)));
"""
# The only annotation of the generated code that the generator's archive lacks.
GENERATED = """
package javax.annotation;
public @interface Generated { String value(); String date() default ""; String comments() default ""; }
"""
