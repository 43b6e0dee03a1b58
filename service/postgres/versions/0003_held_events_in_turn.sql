-- Held events: a tax on no pass of a relay, however many wait; and ids of events that are given out in order.

-- Finds what is due for another attempt, request.created apart from the others.
CREATE INDEX outbox_held_due_by_kind
    ON outbox_held (lane, (type = 'request.created'), next_attempt_at) WHERE parked_at IS NULL;

-- Lets an event wait for those of its request before it. With the search_path of this schema: pg_restore has an empty
-- one. By the index: the plan is kept from a time when the table was empty, and would read all of it for each row.
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

-- Ends the wait of the next event of the request.
CREATE FUNCTION outbox_held_wake_next() RETURNS trigger LANGUAGE plpgsql
    SET search_path FROM CURRENT SET enable_seqscan = off AS $$
BEGIN
    UPDATE outbox_held
       SET next_attempt_at = clock_timestamp()
     WHERE request_id = OLD.request_id
       AND id = (SELECT min(id) FROM outbox_held WHERE request_id = OLD.request_id)
       AND next_attempt_at = 'infinity';
    RETURN NULL;
END $$;
CREATE TRIGGER outbox_held_wake_next AFTER DELETE ON outbox_held
    FOR EACH ROW EXECUTE FUNCTION outbox_held_wake_next();

UPDATE outbox_held
   SET next_attempt_at = 'infinity'
 WHERE EXISTS (SELECT
                 FROM outbox_held AS earlier
                WHERE earlier.request_id = outbox_held.request_id
                  AND earlier.id < outbox_held.id);

-- Gives a transaction its id before the first event of it gets one.
CREATE FUNCTION outbox_number_transaction() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    number xid8 := pg_current_xact_id(); -- not PERFORM, which is a whole query
BEGIN
    RETURN NULL;
END $$;

-- The locks of the table that every request is stored in: last, to be held for a moment; and before that of its
-- sequence, as an INSERT takes them: the other way round the two wait for each other.
CREATE TRIGGER outbox_number_transaction BEFORE INSERT ON outbox
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_number_transaction();
ALTER SEQUENCE outbox_id_seq CACHE 1;

INSERT INTO schema_version (version) VALUES (3);
