-- Requests, the outbox, and the ledger of e-mails.

-- The versions that have been applied. A process is not ready on an older schema than it needs.
CREATE TABLE schema_version (
    version    integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);

-- The law firms that may ask for calculations: the tenants. Never deleted, so that nothing points into the void.
CREATE TABLE conveyancer (
    id                      text PRIMARY KEY CHECK (id <> '' AND length(id) <= 255),
    name                    text NOT NULL,
    charges_calculation_fee boolean NOT NULL,
    created_at              timestamptz NOT NULL DEFAULT now()
);

-- Keys that open the questionnaire. Only the hash of a key is kept; its prefix is its public name.
CREATE TABLE api_key (
    prefix         text PRIMARY KEY,
    key_sha256     bytea NOT NULL UNIQUE,
    conveyancer_id text NOT NULL REFERENCES conveyancer (id),
    created_at     timestamptz NOT NULL DEFAULT now(),
    revoked_at     timestamptz
);

-- Requests for a calculation. No foreign key to conveyancer: the insert selects from it, and the key's lock on
-- that one row would be shared by all concurrent inserts of a firm.
CREATE TABLE calculation_request (
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

-- Events on their way to RabbitMQ, written in the transaction that makes them true and deleted once the broker
-- has confirmed them. The primary key is the order in which a relay reads a lane: one index serves all.
CREATE TABLE outbox (
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
CREATE TABLE outbox_held (
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
CREATE INDEX outbox_held_request ON outbox_held (request_id, id);

-- Finds what is due for another attempt.
CREATE INDEX outbox_held_due ON outbox_held (lane, next_attempt_at) WHERE parked_at IS NULL;

-- The ledger of e-mails: one row per request.created event, written before anything is sent.
CREATE TABLE email (
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
CREATE INDEX email_request ON email (request_id);

-- Finds the e-mails that are due.
CREATE INDEX email_due ON email (next_attempt_at) WHERE state = 'pending';

INSERT INTO schema_version (version) VALUES (1);
