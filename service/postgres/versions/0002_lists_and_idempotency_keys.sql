-- The list of a conveyancer's requests, Idempotency-Keys, uses of API keys, and the trace of an e-mail.

-- To within minutes: never written while a caller waits.
ALTER TABLE api_key ADD COLUMN IF NOT EXISTS last_used_at timestamptz;

-- The Idempotency-Key with which a request was sent, and the SHA-256 of what was sent with it.
ALTER TABLE calculation_request
    ADD COLUMN IF NOT EXISTS idempotency_key    text,
    ADD COLUMN IF NOT EXISTS idempotency_sha256 bytea;

ALTER TABLE email ADD COLUMN IF NOT EXISTS traceparent text;

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

DROP INDEX CONCURRENTLY IF EXISTS calculation_request_listing;
CREATE INDEX CONCURRENTLY calculation_request_listing ON calculation_request (conveyancer_id, id);

DROP INDEX CONCURRENTLY IF EXISTS calculation_request_external_id;
CREATE INDEX CONCURRENTLY calculation_request_external_id
    ON calculation_request (conveyancer_id, external_id, id) WHERE external_id IS NOT NULL;

DROP INDEX CONCURRENTLY IF EXISTS calculation_request_idempotency_key;
CREATE UNIQUE INDEX CONCURRENTLY calculation_request_idempotency_key
    ON calculation_request (conveyancer_id, idempotency_key) WHERE idempotency_key IS NOT NULL;

INSERT INTO schema_version (version) VALUES (2);
