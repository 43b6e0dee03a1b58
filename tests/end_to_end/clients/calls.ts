// The program of a firm: it calls the API with a generated client, and prints the answers.
import * as api from "./index";

declare const process: { argv: string[] };
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
