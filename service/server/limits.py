"""What one caller may hold of an HTTP server. service/README.md has these bounds, and others, in a table."""

# More than the callers that may wait for Postgres by default. At one more, one that waits for its caller is
# closed, see `HttpProtocol.connection_made`.
MOST_CONNECTIONS = 512
HEAD_SECONDS = 10.0  # for a caller to send the head of a request
LARGEST_HEAD = 64 * 1024  # bytes of the request line and the headers: more than cookies and tokens need
MOST_HEADERS = 100  # as in other servers: each takes 100 bytes of memory more than it has
LONGEST_PATH = 1024  # bytes: the router remembers 1,024 paths
LARGEST_BODY = 256 * 1024  # bytes
# To send a body, or to read as many bytes of answers: as long as a slow network takes for the largest body.
BODY_SECONDS = 30.0
LEAST_READ = LARGEST_BODY
# Bytes of all answers together that their callers have not read. A pipelining caller may hold as many again.
MOST_UNREAD = 32 * 1024 * 1024
