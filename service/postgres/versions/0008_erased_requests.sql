-- Erased requests: that they existed, and nothing personal.
CREATE TABLE erased_request (
    id                   uuid PRIMARY KEY,
    conveyancer_id       text NOT NULL,
    created_at           timestamptz NOT NULL,
    erased_at            timestamptz NOT NULL DEFAULT now(),
    sequence             integer NOT NULL,  -- of the latest event about the request
    calculation_id       text,              -- for the team that calculated: it may have to erase that, too
    calculation_sequence integer,           -- of request.calculated
    calculated_at        timestamptz,       -- its time
    key_sha256           bytea              -- of its Idempotency-Key: a create that repeats it is refused
);

-- Keeps the idempotency keys of erased requests from being used again.
CREATE UNIQUE INDEX erased_request_key_sha256
    ON erased_request (conveyancer_id, key_sha256) WHERE key_sha256 IS NOT NULL;

INSERT INTO schema_version (version) VALUES (8);
