-- The database schema. `python -m service schema apply` creates it in an empty database.

-- The schema versions that were applied. A process is not ready until the version it needs is applied.
CREATE TABLE schema_version (
    version     integer PRIMARY KEY,
    applied_at  timestamptz NOT NULL DEFAULT now(),
    fingerprint text     -- of this file, until the first release. Then numbered versions follow it
);

-- The tenants: law firms that request calculations. No row is ever deleted, so no reference dangles.
CREATE TABLE conveyancer (
    id                      text PRIMARY KEY CHECK (id <> '' AND length(id) <= 255),
    name                    text NOT NULL,
    charges_calculation_fee boolean NOT NULL,
    created_at              timestamptz NOT NULL DEFAULT now(),
    disabled_at             timestamptz     -- since then the service refuses the firm's calls
);

-- The conveyancers that are not disabled.
CREATE VIEW active_conveyancer AS
SELECT id, name, charges_calculation_fee
  FROM conveyancer
 WHERE disabled_at IS NULL;

-- API keys for the questionnaire. A key is stored only as a hash. The public prefix identifies the key.
CREATE TABLE api_key (
    prefix     text PRIMARY KEY,
    key_sha256 bytea NOT NULL UNIQUE,
    client     text NOT NULL,   -- the program that sends the key
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz
);

-- Calculation requests. There is no foreign key to conveyancer, because with such a key all concurrent
-- inserts of a firm share a lock on its row. Instead, the insert selects the firm. Firms are never deleted.
CREATE TABLE calculation_request (
    id                            uuid PRIMARY KEY,
    conveyancer_id                text NOT NULL,
    -- Both are written by Postgres, whose clock all processes share. The API and events show whole seconds.
    created_at                    timestamptz NOT NULL DEFAULT date_trunc('second', now()),
    updated_at                    timestamptz NOT NULL DEFAULT date_trunc('second', now()),
    customer_email                text NOT NULL,
    customer_phone                text,
    customer_first_name           text NOT NULL,
    customer_last_name            text NOT NULL,
    sender_email                  text NOT NULL,
    sender_organization_name      text NOT NULL,
    sender_first_name             text NOT NULL,
    sender_last_name              text NOT NULL,
    case_ref                      text NOT NULL,
    request_type                  text NOT NULL,
    property_value                bigint,
    notes                         text,
    external_id                   text,
    meta_data                     json,     -- not jsonb, which loses the order of the keys
    calculation_fee_exempt        boolean NOT NULL,
    calculation_fee_exempt_reason text CHECK (calculation_fee_exempt OR calculation_fee_exempt_reason IS NULL),
    calculation_id                text,
    refused_calculation_id        text,     -- the latest one that came although there is another
    withdrawn_at                  timestamptz,  -- by the firm: the link opens nothing, and no e-mail is sent
    secret_salt                   bytea NOT NULL,
    secret_key_id                 text NOT NULL,  -- the key's name in REQUEST_SECRET_KEYS, and its fingerprint
    sequence                      integer NOT NULL DEFAULT 1, -- of the latest event
    idempotency_key               text,     -- from the create's header Idempotency-Key
    idempotency_sha256            bytea     -- of the normalised body: a repeat must have the same hash
) WITH (fillfactor = 90);

-- For finding the requests of a time, such as the oldest. The clocks of APIs, which are in the ids, may differ.
CREATE INDEX calculation_request_created_at ON calculation_request (created_at);

-- For listing a conveyancer's requests, newest first. The index is read backwards from the cursor.
CREATE INDEX calculation_request_listing ON calculation_request (conveyancer_id, id);

-- For listing a conveyancer's requests with a given external_id.
CREATE INDEX calculation_request_external_id
    ON calculation_request (conveyancer_id, external_id, id) WHERE external_id IS NOT NULL;

-- Allows each conveyancer to use an idempotency key only once.
CREATE UNIQUE INDEX calculation_request_idempotency_key
    ON calculation_request (conveyancer_id, idempotency_key) WHERE idempotency_key IS NOT NULL;

-- A record of each erased request, without personal data.
CREATE TABLE erased_request (
    id             uuid PRIMARY KEY,
    conveyancer_id text NOT NULL,
    created_at     timestamptz NOT NULL,
    erased_at      timestamptz NOT NULL DEFAULT now(),
    calculation_id text,              -- which the calculation team may have to erase, too
    key_sha256     bytea              -- of the idempotency key. A create with that key is refused
);

-- For refusing the idempotency keys of erased requests.
CREATE UNIQUE INDEX erased_request_key_sha256
    ON erased_request (conveyancer_id, key_sha256) WHERE key_sha256 IS NOT NULL;

-- Every event, as it is sent. It is never deleted. Only an erasure changes its data: what the firm chose becomes
-- null. The relay, replays, the API and trace read this row.
CREATE TABLE event (
    request_id     uuid NOT NULL,
    sequence       integer NOT NULL,   -- 1, 2, … within the request
    type           text NOT NULL,
    conveyancer_id text NOT NULL,
    time           timestamptz NOT NULL,  -- in whole seconds, by Postgres' clock
    data           json NOT NULL,      -- the CloudEvent's data. jsonb would change the bytes that are sent
    -- The transaction that wrote the event, or that of the request's previous event if it has a higher id. So
    -- the order of (transaction, sequence) keeps the order within a request. Once all transactions up to an id
    -- have ended, no new event can have that id or a lower one. After a logical copy the ids may be 0.
    transaction    xid8 NOT NULL,
    PRIMARY KEY (request_id, sequence)
);

-- For reading the events of a conveyancer in the order of their transactions.
CREATE INDEX event_feed ON event (conveyancer_id, transaction, request_id, sequence);

-- The queue of the relays. It points to each event that RabbitMQ has not confirmed. A pointer is written in the
-- transaction of its event or by a replay, and deleted once RabbitMQ has confirmed the event. DELETE handled
-- 130,000 published rows per second. An UPDATE that marked the rows as published handled 9,800.
-- An event is pending while next_attempt_at is null. If RabbitMQ refuses, returns or does not confirm the event,
-- it is held until next_attempt_at, with the later events of its request.
CREATE TABLE outbox (
    request_id      uuid NOT NULL,
    sequence        integer NOT NULL,
    traceparent     text,              -- of the change (W3C Trace Context)
    created_at      timestamptz NOT NULL DEFAULT now(),
    attempts        integer NOT NULL DEFAULT 0,  -- failures. 0 if the event waits for an earlier event
    next_attempt_at timestamptz,
    last_error      text,
    PRIMARY KEY (request_id, sequence) -- also for finding the earlier events of a request
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);

-- For finding the oldest pending events.
CREATE INDEX outbox_pending ON outbox (created_at) WHERE next_attempt_at IS NULL;

-- For finding the held events that are due.
CREATE INDEX outbox_retried ON outbox (next_attempt_at) WHERE next_attempt_at IS NOT NULL;

-- The ledger of e-mails. It has one row for each e-mail, written before the first attempt.
CREATE TABLE email (
    request_id      uuid NOT NULL,
    number          integer NOT NULL,  -- 1, 2, … within the request. request.created causes number 1
    kind            text NOT NULL,     -- such as invitation
    requested_by    text,      -- the client_id of the caller of the API that asked for the e-mail
    state           text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'sent', 'failed')),
    attempts        integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz NOT NULL DEFAULT now(),
    claimed_by      uuid,      -- the process that has claimed the e-mail, until next_attempt_at
    server_reply    text,
    created_at      timestamptz NOT NULL DEFAULT now(),
    settled_at      timestamptz,   -- the time of request.email_sent or request.email_failed, in whole seconds
    smtp_code       integer,       -- in request.email_failed
    traceparent     text,          -- from the message that carried the event (W3C Trace Context)
    reason          text,          -- in request.email_failed
    PRIMARY KEY (request_id, number),
    CHECK ((state = 'failed') = (reason IS NOT NULL))
);

-- For finding the e-mails that are due.
CREATE INDEX email_due ON email (next_attempt_at) WHERE state = 'pending';

-- When Postgres last came up, in one row. The table is unlogged, so crash recovery and failover empty it. The
-- next claim of an e-mail then inserts the row again. No other trace of a crash or failover is readable for
-- every user. A clean restart may keep the row, but changes pg_postmaster_start_time().
CREATE UNLOGGED TABLE postgres_up (
    is_up boolean PRIMARY KEY DEFAULT true CHECK (is_up),
    since timestamptz NOT NULL
);
INSERT INTO postgres_up (since) VALUES (pg_postmaster_start_time());

-- The changes that operators made, with one row per request or conveyancer. No row contains personal data of
-- a customer.
CREATE TABLE operator_action (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    request_id     uuid,
    conveyancer_id text,
    action         text NOT NULL,  -- the command, such as emails resend
    subject        text,           -- such as an event id or an e-mail key
    operator       text NOT NULL,
    note           text,
    at             timestamptz NOT NULL DEFAULT now(),
    CHECK (request_id IS NULL OR conveyancer_id IS NULL) -- both are null for a replay of many requests
);

-- For finding the changes to a request (trace).
CREATE INDEX operator_action_request ON operator_action (request_id) WHERE request_id IS NOT NULL;

INSERT INTO schema_version (version) VALUES (1);
