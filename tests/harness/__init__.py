"""What tests and measurements share: servers, processes, proxies and stand-ins, one of each kind."""
