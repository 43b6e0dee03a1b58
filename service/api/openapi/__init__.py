"""The OpenAPI document, which Litestar generates from the handlers, and the page that shows it."""
