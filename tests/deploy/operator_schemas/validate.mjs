// Reads a JSON list of manifests and prints one line for each that its operator's published schema refuses.
import { readFileSync } from "node:fs";

const packages = {
  "postgresql.cnpg.io": "cloudnative-pg",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

for (const manifest of JSON.parse(readFileSync(0))) {
  const [group, version] = manifest.apiVersion.split("/");
  const models = await import(`@kubernetes-models/${packages[group]}/${group}/${version}`);
  try {
    new models[manifest.kind](manifest).validate();
  } catch (error) {
    console.log(`${manifest.kind} ${manifest.metadata.name}: ${error.message}`);
  }
}
