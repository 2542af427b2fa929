// Validates manifests of kinds that are not Kubernetes' own: node check.mjs FILE, a JSON list of them.
// Prints a list of what is wrong, with fields that no schema knows: validators read those that they know.
import { readFileSync } from 'node:fs';
import { Certificate, Issuer } from '@kubernetes-models/cert-manager/cert-manager.io/v1';
import { ScaledObject } from '@kubernetes-models/keda/keda.sh/v1alpha1';
import { PodMonitor, PrometheusRule } from '@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1';

const kinds = { Certificate, Issuer, ScaledObject, PodMonitor, PrometheusRule };
const fields = (value, path) => typeof value !== 'object' || value === null ? []
  : Object.entries(value).flatMap(([key, inner]) => [`${path}/${key}`, ...fields(inner, `${path}/${key}`)]);

function watched(value, path, read) {
  if (typeof value !== 'object' || value === null) return value;
  return new Proxy(value, { get(target, key) {
    if (typeof key === 'symbol') return target[key];
    read.add(`${path}/${key}`);
    return watched(target[key], `${path}/${key}`, read);
  } });
}

const wrong = [];
for (const manifest of JSON.parse(readFileSync(process.argv[2], 'utf8'))) {
  const name = `${manifest.kind} ${manifest.metadata.name}`, read = new Set();
  const made = new kinds[manifest.kind]();
  for (const key of Object.keys(made)) delete made[key];
  Object.assign(made, watched(manifest, '', read));
  read.clear();
  try {
    made.validate();
  } catch (error) {
    wrong.push(`${name}: ${error.message}`);
  }
  for (const field of fields(manifest, '')) {
    if (!read.has(field) && !/^\/(apiVersion|kind|metadata|spec$)/.test(field)) wrong.push(`${name}: no schema knows ${field}`);
  }
}
console.log(JSON.stringify(wrong));
