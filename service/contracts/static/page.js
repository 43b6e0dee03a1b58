// Starts Swagger UI.
"use strict";

SwaggerUIBundle({
  url: "/schema/openapi.json",
  dom_id: "#operations",
  deepLinking: true,
  // Otherwise the page would send the document to a validator on the internet.
  validatorUrl: null,
  // No list of schemas: each operation shows its own.
  defaultModelsExpandDepth: -1,
});
