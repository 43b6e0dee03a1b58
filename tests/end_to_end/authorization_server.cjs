// authorization_server.cjs PORT CERTIFICATE KEYS AUDIENCE CLIENT SECRET: oidc-provider over HTTPS, with everything in memory.
// SIGHUP makes it read the keys again. Its maintainer's way is a restart, which would be an outage as well.
const { readFileSync } = require("node:fs");
const { createServer } = require("node:https");

const [port, certificate, keys, audience, client, secret] = process.argv.slice(2);
const scopes = ["request:read", "request:write"];

const configuration = {
  clients: [
    {
      client_id: client,
      client_secret: secret,
      grant_types: ["client_credentials"],
      redirect_uris: [],
      response_types: [],
    },
  ],
  clientDefaults: { id_token_signed_response_alg: "ES256" }, // of access tokens, too
  scopes,
  features: {
    clientCredentials: { enabled: true },
    devInteractions: { enabled: false },
    // A token for a resource is a JWT as in RFC 9068; any other token is opaque.
    resourceIndicators: {
      enabled: true,
      getResourceServerInfo: () => ({ audience, scope: scopes.join(" "), accessTokenFormat: "jwt" }),
    },
  },
};

// It is a module of the kind that only `import` loads.
import(require.resolve("oidc-provider")).then(({ Provider }) => {
  const provide = () => {
    const jwks = JSON.parse(readFileSync(keys));
    return new Provider(`https://127.0.0.1:${port}`, { ...configuration, jwks }).callback();
  };
  let answer = provide();
  process.on("SIGHUP", () => (answer = provide()));
  const pem = readFileSync(certificate);
  createServer({ key: pem, cert: pem }, (...exchange) => answer(...exchange)).listen(port, "127.0.0.1");
});
