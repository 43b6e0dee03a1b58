ALTER TABLE calculation_request ADD COLUMN reference text;
ALTER TABLE outbox ADD COLUMN reference text;
