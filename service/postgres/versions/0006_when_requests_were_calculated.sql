-- When a request was calculated, in a column of its own.

-- The time of request.calculated. Null in a row that an earlier release wrote and that was not updated since: then it
-- is updated_at. Those rows are not filled in here: an UPDATE of them all would lock them while requests are stored.
ALTER TABLE calculation_request ADD COLUMN calculated_at timestamptz;

-- Fills in calculated_at before updated_at can change. This is a trigger, because workers of the earlier release write
-- no calculated_at, and because it fills in old rows one by one.
CREATE FUNCTION calculation_request_keep_calculated_at() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.calculated_at := CASE WHEN OLD.calculation_sequence IS NULL
                              THEN NEW.updated_at
                              ELSE OLD.updated_at END;
    RETURN NEW;
END $$;
CREATE TRIGGER calculation_request_keep_calculated_at BEFORE UPDATE ON calculation_request
    FOR EACH ROW WHEN (NEW.calculation_sequence IS NOT NULL AND NEW.calculated_at IS NULL)
    EXECUTE FUNCTION calculation_request_keep_calculated_at();

INSERT INTO schema_version (version) VALUES (6);
