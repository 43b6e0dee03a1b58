-- Events that waited behind a refused one are due before all that were refused: those are tried one by one.

CREATE OR REPLACE FUNCTION outbox_held_wake_next() RETURNS trigger LANGUAGE plpgsql
    SET search_path FROM CURRENT SET enable_seqscan = off AS $$
BEGIN
    UPDATE outbox_held
       SET next_attempt_at = '-infinity'
     WHERE request_id = OLD.request_id
       AND id = (SELECT min(id) FROM outbox_held WHERE request_id = OLD.request_id)
       AND next_attempt_at = 'infinity';
    RETURN NULL;
END $$;

INSERT INTO schema_version (version) VALUES (5);
