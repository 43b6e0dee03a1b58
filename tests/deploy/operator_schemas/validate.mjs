// Reads a JSON list of manifests and prints one line for each that its operator's published schema refuses,
// and for each that has fields which the schema does not know.
import { readFileSync } from "node:fs";

const packages = {
  "postgresql.cnpg.io": "cloudnative-pg",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
  "cert-manager.io": "cert-manager",
  "gateway.networking.k8s.io": "gateway-api",
};

// The published validators let unknown fields pass, but read every field that they know: a field left unread is unknown.
function watched(value, path, unread) {
  if (typeof value !== "object" || value === null) return value;
  const fields = Object.entries(value).map(([name, field]) => {
    if (!Array.isArray(value)) unread.add(`${path}/${name}`);
    return [name, watched(field, `${path}/${name}`, unread)];
  });
  return new Proxy(Array.isArray(value) ? fields.map(([, field]) => field) : Object.fromEntries(fields), {
    get(target, name) {
      unread.delete(`${path}/${String(name)}`);
      return target[name];
    },
  });
}

for (const manifest of JSON.parse(readFileSync(0))) {
  const [group, version] = manifest.apiVersion.split("/");
  const models = await import(`@kubernetes-models/${packages[group]}/${group}/${version}`);
  const unread = new Set();
  try {
    // Not of an instance: its constructor reads everything.
    models[manifest.kind].prototype.validate.call(watched(manifest, "", unread));
    if (unread.size) throw new Error(`unknown fields: ${[...unread].join(", ")}`);
  } catch (error) {
    console.log(`${manifest.kind} ${manifest.metadata.name}: ${error.message}`);
  }
}
