"""Programs of a firm in two languages, which call the API with a client made by openapi-generator.

Each prints what it got.
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
