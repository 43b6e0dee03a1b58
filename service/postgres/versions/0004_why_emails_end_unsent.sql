-- Why an e-mail ended unsent, and since when Postgres has been up.

-- refused, gave_up, not_composable or cancelled. Null in older rows, whose smtp_code tells the first two apart.
ALTER TABLE email ADD COLUMN reason text;

-- Since when Postgres has been up, in one row that the first claim of an e-mail writes: crash recovery and failover
-- empty a table without a log, and change nothing else that every user may read. A restart may leave the row, and
-- shows in pg_postmaster_start_time().
CREATE UNLOGGED TABLE postgres_up (
    is_up boolean PRIMARY KEY DEFAULT true CHECK (is_up),
    since timestamptz NOT NULL
);
INSERT INTO postgres_up (since) VALUES (pg_postmaster_start_time());

INSERT INTO schema_version (version) VALUES (4);
