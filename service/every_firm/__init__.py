"""What workers and operators do to the requests of every conveyancer. The API uses none of it."""
