DROP INDEX CONCURRENTLY IF EXISTS calculation_request_case_ref;
CREATE INDEX CONCURRENTLY calculation_request_case_ref ON calculation_request (conveyancer_id, case_ref);
