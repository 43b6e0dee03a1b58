-- The database schema. `python -m service schema apply` creates it in an empty database.

-- The schema versions that were applied. A process is not ready until the version it needs is applied.
CREATE TABLE schema_version (
    version    integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
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
    secret_salt                   bytea NOT NULL,
    secret_key_id                 text NOT NULL,
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

-- For listing a conveyancer's requests with a calculation, in the order of their changes.
CREATE INDEX calculation_request_changes
    ON calculation_request (conveyancer_id, updated_at, id) WHERE calculation_id IS NOT NULL;

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

-- Every event that was written about a request, but for request.created, which follows from the request's row.
-- Replays, the API and trace read it. Without personal data, so an erasure leaves it as it is.
CREATE TABLE recorded_event (
    request_id uuid NOT NULL,
    sequence   integer NOT NULL,
    type       text NOT NULL,
    at         timestamptz NOT NULL,   -- the event's time, in whole seconds
    facts      json NOT NULL,          -- the fields that only events of this type have
    PRIMARY KEY (request_id, sequence)
);

-- Events to publish to RabbitMQ. An event is written in the transaction of the change that it announces, and
-- deleted once RabbitMQ has confirmed it. An event that fails moves to outbox_held, with the later events of
-- its request. Relays read a lane in the order of the primary key, so one index is enough. DELETE handled 130,000
-- published rows per second. An UPDATE that marked the rows as published handled 9,800.
CREATE TABLE outbox (
    lane        smallint NOT NULL,
    -- In order within a request: a change locks the request's row before it takes an id, and ids are not cached.
    id          bigint GENERATED ALWAYS AS IDENTITY (CACHE 1),
    request_id  uuid NOT NULL,
    type        text NOT NULL,
    sequence    integer NOT NULL,
    traceparent text,
    payload     bytea NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (lane, id)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 5000,
        autovacuum_vacuum_cost_delay = 0);

-- Held events: the events that have failed, because RabbitMQ refused, returned or did not confirm them, and the
-- later events of the same requests, which wait. They have a table of their own, so that they never block a
-- lane or delay another request. An event is deleted once RabbitMQ has confirmed it.
-- Only the first event of a request may be due. The others have infinity as next_attempt_at, so that relays do
-- not read them in every pass. When one of them becomes the first of its request, a trigger sets -infinity. So
-- it is due before the failed events of other requests, which may be many.
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
    PRIMARY KEY (lane, id)
);

-- For finding the earlier events of a request.
CREATE INDEX outbox_held_request ON outbox_held (request_id, id);

-- For finding the events that are due.
CREATE INDEX outbox_held_due ON outbox_held (lane, next_attempt_at);

-- Makes an event wait for the earlier events of its request. The function sets search_path to this schema,
-- because pg_restore runs with an empty search_path. The function turns sequential scans off, because a plan
-- made while the table was empty would later read the whole table for each row.
CREATE FUNCTION outbox_held_let_wait() RETURNS trigger LANGUAGE plpgsql
    SET search_path FROM CURRENT SET enable_seqscan = off AS $$
BEGIN
    IF EXISTS (SELECT FROM outbox_held WHERE request_id = NEW.request_id AND id < NEW.id) THEN
        NEW.next_attempt_at := 'infinity';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER outbox_held_let_wait BEFORE INSERT ON outbox_held
    FOR EACH ROW EXECUTE FUNCTION outbox_held_let_wait();

-- When an event is deleted, makes the next event of its request due. A trigger does this, because a person
-- may delete the event with psql. Without the trigger, the next event would then wait forever.
CREATE FUNCTION outbox_held_wake_next() RETURNS trigger LANGUAGE plpgsql
    SET search_path FROM CURRENT SET enable_seqscan = off AS $$
BEGIN
    UPDATE outbox_held
       SET next_attempt_at = '-infinity'
     WHERE request_id = OLD.request_id
       AND id = (SELECT min(id) FROM outbox_held WHERE request_id = OLD.request_id)
       AND next_attempt_at = 'infinity';
    RETURN NULL;
END $$;
CREATE TRIGGER outbox_held_wake_next AFTER DELETE ON outbox_held
    FOR EACH ROW EXECUTE FUNCTION outbox_held_wake_next();

-- Every event that RabbitMQ has not confirmed, and its state: pending (in outbox), retrying (held, and has
-- failed) or waiting (held, but not tried yet, because an earlier event of its request has failed).
CREATE VIEW undelivered_event AS
SELECT lane, id, request_id, type, sequence, created_at, 'pending' AS state, 0 AS attempts,
       NULL::text AS last_error, NULL::timestamptz AS next_attempt_at
  FROM outbox
UNION ALL
SELECT lane, id, request_id, type, sequence, created_at,
       CASE WHEN attempts > 0 THEN 'retrying' ELSE 'waiting' END AS state,
       attempts, last_error, next_attempt_at
  FROM outbox_held;

-- Fingerprints of the keys in REQUEST_SECRET_KEYS, to detect changed keys, which make earlier links invalid.
CREATE TABLE secret_key (
    id          text PRIMARY KEY,
    fingerprint bytea NOT NULL     -- distinguishes keys, and reveals nothing else
);

-- The ledger of e-mails. It has one row for each e-mail, written before the first attempt. The email_key of a
-- request's first e-mail is the id of the event request.created.
CREATE TABLE email (
    email_key       text PRIMARY KEY,
    request_id      uuid NOT NULL,
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
    CHECK ((state = 'failed') = (reason IS NOT NULL))
);

-- For finding the e-mails of a request: for operators (trace, reconcile).
CREATE INDEX email_request ON email (request_id);

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
