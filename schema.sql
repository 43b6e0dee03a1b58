-- The whole schema. Every statement may run again: `python -m service schema apply` runs them all, in one
-- transaction under an advisory lock.

-- Which version of this file has been applied. A process refuses to become ready on an older one.
CREATE TABLE IF NOT EXISTS schema_version (
    version    integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- The law firms that may ask for calculations: the tenants. Never deleted, so that nothing points into the void.
CREATE TABLE IF NOT EXISTS conveyancer (
    id                      text PRIMARY KEY CHECK (id <> '' AND length(id) <= 255),
    name                    text NOT NULL,
    charges_calculation_fee boolean NOT NULL,
    created_at              timestamptz NOT NULL DEFAULT now()
);

-- Keys that open the questionnaire. Only the hash of a key is kept; its prefix is its public name.
CREATE TABLE IF NOT EXISTS api_key (
    prefix         text PRIMARY KEY,
    key_sha256     bytea NOT NULL UNIQUE,
    conveyancer_id text NOT NULL REFERENCES conveyancer (id),
    created_at     timestamptz NOT NULL DEFAULT now(),
    revoked_at     timestamptz
);

-- Requests for a calculation. No foreign key to conveyancer: the insert selects from it, and the key's lock on
-- that one row would be shared by all concurrent inserts of a firm.
CREATE TABLE IF NOT EXISTS calculation_request (
    id                            uuid PRIMARY KEY,
    conveyancer_id                text NOT NULL,
    created_at                    timestamptz NOT NULL,
    updated_at                    timestamptz NOT NULL,
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
    meta_data                     json,     -- not jsonb: its keys keep their order
    calculation_fee_exempt        boolean NOT NULL,
    calculation_fee_exempt_reason text CHECK (calculation_fee_exempt OR calculation_fee_exempt_reason IS NULL),
    calculation_id                text,
    secret_salt                   bytea NOT NULL,
    secret_key_id                 text NOT NULL,
    sequence                      integer NOT NULL DEFAULT 1, -- that of the latest event about this request
    calculation_sequence          integer   -- that of request.calculated; its time is updated_at
) WITH (fillfactor = 90);

-- Lists a conveyancer's requests, newest first: read backwards, from the cursor.
CREATE INDEX IF NOT EXISTS calculation_request_listing ON calculation_request (conveyancer_id, id);

-- The same for the requests with one external_id.
CREATE INDEX IF NOT EXISTS calculation_request_external_id
    ON calculation_request (conveyancer_id, external_id, id) WHERE external_id IS NOT NULL;

-- Events on their way to RabbitMQ, written in the transaction that makes them true and deleted once the broker
-- has confirmed them. The primary key is the order in which a relay reads a lane: one index serves all.
CREATE TABLE IF NOT EXISTS outbox (
    lane        smallint NOT NULL,
    id          bigint GENERATED ALWAYS AS IDENTITY,
    request_id  uuid NOT NULL,
    type        text NOT NULL,
    sequence    integer NOT NULL,
    traceparent text,
    payload     bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (lane, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);

-- Events that the broker refused, and behind each the later ones of the same request. Out of the outbox, so that
-- they delay nobody else.
CREATE TABLE IF NOT EXISTS outbox_held (
    lane            smallint NOT NULL,
    id              bigint NOT NULL,
    request_id      uuid NOT NULL,
    type            text NOT NULL,
    sequence        integer NOT NULL,
    traceparent     text,
    payload         bytea NOT NULL,
    created_at      timestamptz NOT NULL,
    attempts        integer NOT NULL,
    next_attempt_at timestamptz NOT NULL,
    last_error      text,
    parked_at       timestamptz,
    PRIMARY KEY (lane, id)
);

-- Finds what stands before an event of the same request.
CREATE INDEX IF NOT EXISTS outbox_held_request ON outbox_held (request_id, id);

-- Finds what is due for another attempt.
CREATE INDEX IF NOT EXISTS outbox_held_due ON outbox_held (lane, next_attempt_at) WHERE parked_at IS NULL;

-- Every event that has not left for RabbitMQ, and why. pending: in the outbox; failing: refused, to be tried again;
-- waiting: behind a failing or parked event of its own request; parked: refused too often, or put aside by an
-- operator.
CREATE OR REPLACE VIEW undelivered_event AS
SELECT lane, id, request_id, type, sequence, created_at, 'pending' AS state, 0 AS attempts,
       NULL::text AS last_error, NULL::timestamptz AS next_attempt_at, NULL::timestamptz AS parked_at
  FROM outbox
UNION ALL
SELECT lane, id, request_id, type, sequence, created_at,
       CASE WHEN parked_at IS NOT NULL THEN 'parked'
            WHEN attempts > 0 THEN 'failing'
            ELSE 'waiting' END AS state,
       attempts, last_error, next_attempt_at, parked_at
  FROM outbox_held;

-- The ledger of e-mails: one row per request.created event, written before anything is sent.
CREATE TABLE IF NOT EXISTS email (
    event_id        text PRIMARY KEY,
    request_id      uuid NOT NULL,
    state           text NOT NULL DEFAULT 'pending' CHECK (state IN ('pending', 'sent', 'failed')),
    attempts        integer NOT NULL DEFAULT 0,
    next_attempt_at timestamptz NOT NULL DEFAULT now(),
    claimed_by      uuid,      -- the process that is sending it; next_attempt_at is then the end of its claim
    server_reply    text,
    created_at      timestamptz NOT NULL DEFAULT now(),
    settled_at      timestamptz,   -- the time of request.email_sent or _failed, in whole seconds
    event_sequence  integer,       -- that of this event
    smtp_code       integer        -- in request.email_failed
);

-- Finds the e-mail of a request, for operators: trace, replay, reconcile.
CREATE INDEX IF NOT EXISTS email_request ON email (request_id);

-- Finds the e-mails that are due.
CREATE INDEX IF NOT EXISTS email_due ON email (next_attempt_at) WHERE state = 'pending';

-- Version 2: columns that came later. Only once: the lock that ALTER TABLE wants would let all traffic wait behind
-- a backup.
DO $$
BEGIN
    IF NOT EXISTS (SELECT FROM schema_version WHERE version >= 2) THEN
        -- So that an operator sees which keys nobody needs any more. To within minutes: never written while a
        -- caller waits.
        ALTER TABLE api_key ADD COLUMN IF NOT EXISTS last_used_at timestamptz;

        -- The Idempotency-Key with which a request was sent, and the SHA-256 of what was sent with it.
        ALTER TABLE calculation_request
            ADD COLUMN IF NOT EXISTS idempotency_key    text,
            ADD COLUMN IF NOT EXISTS idempotency_sha256 bytea;

        -- The trace of the message that brought the event (W3C Trace Context).
        ALTER TABLE email ADD COLUMN IF NOT EXISTS traceparent text;
    END IF;
END $$;

-- Lets a conveyancer use an idempotency key once.
CREATE UNIQUE INDEX IF NOT EXISTS calculation_request_idempotency_key
    ON calculation_request (conveyancer_id, idempotency_key) WHERE idempotency_key IS NOT NULL;

INSERT INTO schema_version (version) VALUES (2) ON CONFLICT DO NOTHING;
