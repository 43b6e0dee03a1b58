"""The limits of an HTTP server on its callers. service/README.md lists these and others in a table."""

# More than the callers that may wait for Postgres by default. If there are more connections, one of them is
# closed: see `HttpProtocol.connection_made`.
MOST_CONNECTIONS = 512
HEAD_SECONDS = 10.0  # for a caller to send the head of a request
LARGEST_HEAD = 64 * 1024  # bytes of the request line and the headers: more than cookies and tokens need
MOST_HEADERS = 100  # as in other servers; a header takes 100 bytes of memory more than its text
LONGEST_PATH = 1024  # bytes; the router caches 1,024 paths
LARGEST_BODY = 256 * 1024  # bytes
# For a caller to send a body, or to read LEAST_READ bytes of responses: enough on a slow network.
BODY_SECONDS = 30.0
LEAST_READ = LARGEST_BODY
# Unread bytes of all responses together. Callers that pipeline may double this.
MOST_UNREAD = 32 * 1024 * 1024
