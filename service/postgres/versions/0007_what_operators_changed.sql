-- What operators changed: who, when and why.

-- The changes that operators made, a row for each request concerned. They contain no personal data of customers.
CREATE TABLE operator_action (
    id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    request_id uuid NOT NULL,
    action     text NOT NULL,  -- the words of the command
    subject    text,           -- the id of the event, or the key of the e-mail
    operator   text NOT NULL,
    reason     text,
    at         timestamptz NOT NULL DEFAULT now()
);

-- Finds the changes to a request, for operators (trace).
CREATE INDEX operator_action_request ON operator_action (request_id);

INSERT INTO schema_version (version) VALUES (7);
