CREATE INDEX IF NOT EXISTS calculation_request_case_ref ON calculation_request (conveyancer_id, case_ref);
