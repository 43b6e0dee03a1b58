"""The limits of an HTTP server on its callers. deploy/reference.md lists these and others in a table."""

# Together fewer than the 1,024 files that a process may often open. Further connections wait until one ends.
MOST_CONNECTIONS = 800  # of callers
MOST_PROBE_CONNECTIONS = 50
LARGEST_HEAD = 64 * 1024  # bytes of the request line and the headers: more than cookies and tokens need
LONGEST_PATH = 1024  # bytes; the router caches 1,024 paths
LARGEST_BODY = 256 * 1024  # bytes
BODY_SECONDS = 30.0  # for a caller to send a body: enough on a slow network
