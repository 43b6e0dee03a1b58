"""What is recorded during a run, and the invariants that the record is judged by."""
