"""Changes that workers and operators make to requests of any conveyancer. The API does not use them."""
