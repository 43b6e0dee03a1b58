-- What operators changed: who, when and why.

-- Since when the service refuses a conveyancer; null if it does not.
ALTER TABLE conveyancer ADD COLUMN disabled_at timestamptz;

-- The conveyancers that may use the service now.
CREATE VIEW active_conveyancer AS
SELECT id, name, charges_calculation_fee
  FROM conveyancer
 WHERE disabled_at IS NULL;

-- The changes that operators made: a row for each request or conveyancer concerned. They contain no personal data of
-- customers.
CREATE TABLE operator_action (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    request_id     uuid,
    conveyancer_id text,
    action         text NOT NULL,  -- the words of the command
    subject        text,           -- the id of the event, or the key of the e-mail
    operator       text NOT NULL,
    reason         text,
    at             timestamptz NOT NULL DEFAULT now(),
    CHECK ((request_id IS NULL) <> (conveyancer_id IS NULL))
);

-- Finds the changes to a request, for operators (trace).
CREATE INDEX operator_action_request ON operator_action (request_id) WHERE request_id IS NOT NULL;

-- Finds the changes to a conveyancer, for operators (trace).
CREATE INDEX operator_action_conveyancer ON operator_action (conveyancer_id) WHERE conveyancer_id IS NOT NULL;

INSERT INTO schema_version (version) VALUES (7);
