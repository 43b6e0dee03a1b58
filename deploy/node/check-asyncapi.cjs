// check-asyncapi.cjs FILE: exit status 1, and a line for each fault, if FILE is no valid AsyncAPI document.
// AsyncAPI's own parser, because of two packages on PyPI that know AsyncAPI 3, pydantic-asyncapi refuses valid AMQP
// channels, and asyncapi3 has just begun.
const { readFileSync } = require("node:fs");
const { Parser } = require("@asyncapi/parser");

const ERROR = 0;

new Parser().parse(readFileSync(process.argv[2], "utf8")).then(({ document, diagnostics }) => {
  const faults = diagnostics.filter(({ severity }) => severity === ERROR);
  for (const { path, message } of faults) console.log(`${path.join(".")}: ${message}`);
  process.exitCode = document && faults.length === 0 ? 0 : 1;
});
