-- Takes from all users the right to hold advisory locks and to create large objects. The API keeps the locks that it needs.
-- A superuser runs this in the service's database, once the schema is applied, with the owner's name in place of OWNER. This shows who
-- holds such locks: SELECT pid, usename, client_addr FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory'
DO $$
DECLARE function_name regprocedure;
BEGIN
    FOR function_name IN
        SELECT oid FROM pg_proc WHERE proname ~ '^(pg_(try_)?advisory_(xact_)?lock(_shared)?|lo_creat|lo_create|lo_from_bytea)$'
    LOOP
        EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', function_name);
        EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO OWNER', function_name);
        IF function_name::text ~ 'advisory_xact' THEN
            EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO calculation_requests_api', function_name);
        END IF;
    END LOOP;
END $$;
