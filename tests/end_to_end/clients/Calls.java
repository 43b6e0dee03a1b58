// The program of a firm: it calls the API with a generated client, and prints the answers.
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
