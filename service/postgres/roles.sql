-- What each role may do in the database. `python -m service schema apply` runs this as the owner of the tables.
-- Roles that do not exist are left out: the service also runs with the owner's role alone. An administrator
-- creates the roles, because the owner may not (deploy/README.md). Each role may log in, or be a group.
--
-- No role may alter, truncate or drop a table of the service, or change the records of operators' actions.
DO $$
DECLARE
    role_name name;
    granted text;
BEGIN
    FOR role_name, granted IN
        SELECT rolname, privilege
          FROM (VALUES
            -- The API stores, reads and changes requests, and cancels and adds their e-mails.
            ('api', 'SELECT, INSERT, UPDATE (sequence, customer_email, secret_salt, secret_key_id, updated_at,
                                             withdrawn_at) ON calculation_request'),
            ('api', 'SELECT, INSERT ON event'),
            ('api', 'INSERT, SELECT (request_id, sequence, next_attempt_at) ON outbox'),
            ('api', 'SELECT, INSERT, UPDATE ON email'),
            ('api', 'SELECT (id) ON conveyancer'),
            ('api', 'SELECT ON active_conveyancer, api_key, erased_request'),

            -- The worker publishes events, sends e-mails, records calculations, and erases old requests.
            ('worker', 'SELECT, DELETE ON calculation_request'),
            ('worker', 'UPDATE (sequence, calculation_id, refused_calculation_id, updated_at)
                           ON calculation_request'),
            ('worker', 'SELECT, INSERT, UPDATE (attempts, next_attempt_at, last_error), DELETE ON outbox'),
            ('worker', 'SELECT, INSERT, UPDATE (data) ON event'),
            ('worker', 'SELECT, INSERT, UPDATE ON email'),
            ('worker', 'SELECT, INSERT ON erased_request, postgres_up'),
            ('worker', 'SELECT ON conveyancer'),

            -- Operators' commands.
            ('operator', 'SELECT, DELETE ON calculation_request'),
            ('operator', 'UPDATE (sequence, customer_email, secret_salt, secret_key_id, updated_at)
                             ON calculation_request'),
            -- Locking a row needs the right to update one of its columns.
            ('operator', 'SELECT, INSERT, UPDATE (next_attempt_at) ON outbox'),
            ('operator', 'SELECT, INSERT, UPDATE (data) ON event'),
            ('operator', 'SELECT, INSERT, UPDATE ON email'),
            ('operator', 'SELECT, INSERT, UPDATE (name, charges_calculation_fee, disabled_at) ON conveyancer'),
            ('operator', 'SELECT, INSERT, UPDATE (revoked_at) ON api_key'),
            ('operator', 'SELECT, INSERT ON erased_request, operator_action'),
            ('operator', 'SELECT ON active_conveyancer'),

            -- The autoscaler counts what waits. It reads no customer data.
            ('scaling', 'SELECT (created_at, next_attempt_at) ON outbox'),
            ('scaling', 'SELECT (state, next_attempt_at) ON email')
          ) AS needed (role, privilege)
          JOIN pg_roles ON rolname = 'calculation_requests_' || role
         UNION ALL
        SELECT rolname, privilege
          FROM pg_roles,
               (VALUES (format('USAGE ON SCHEMA %I', current_schema)), ('SELECT ON schema_version'))
               AS for_all (privilege)
         WHERE rolname ~ '^calculation_requests_(api|worker|operator|scaling)$'
    LOOP
        EXECUTE format('GRANT %s TO %I', granted, role_name);
    END LOOP;
    -- Postgres only warns if this user may not revoke them.
    EXECUTE format('REVOKE TEMPORARY ON DATABASE %I FROM PUBLIC', current_database());
    EXECUTE format('REVOKE CREATE ON SCHEMA %I FROM PUBLIC', current_schema);
END $$;
