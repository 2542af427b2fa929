// A Baton client in Node, from protos/ alone: the recipe of docs/clients.md, and what the tests run.
import { readFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import grpc from '@grpc/grpc-js';
import loader from '@grpc/proto-loader';

const PROTOS = fileURLToPath(new URL('../../protos', import.meta.url));
const API = 'baton/inference/v1';
const OPTIONS = { longs: String, enums: String, defaults: true, oneofs: true };
const MAX_MESSAGE_BYTES = 64 * 1024 * 1024;

export function connect(address, options = {}) {
  const loaded = loader.loadSync(`${API}/inference.proto`, { ...OPTIONS, includeDirs: [PROTOS] });
  const { InferenceService } = grpc.loadPackageDefinition(loaded).baton.inference.v1;
  return new InferenceService(address, grpc.credentials.createInsecure(), {
    'grpc.service_config': readFileSync(`${PROTOS}/${API}/service_config.json`, 'utf8'),
    'grpc.per_rpc_retry_buffer_size': MAX_MESSAGE_BYTES,
    'grpc.keepalive_time_ms': 500,
    'grpc.keepalive_timeout_ms': 10000,
    'grpc.keepalive_permit_without_calls': 1,
    'grpc.max_send_message_length': MAX_MESSAGE_BYTES,
    'grpc.max_receive_message_length': MAX_MESSAGE_BYTES,
    ...options,
  });
}

// A method with one response, as a promise.
export function ask(client, method, request, timeoutMs = 20_000) {
  return new Promise((resolve, reject) => {
    client[method](request, { deadline: Date.now() + timeoutMs }, (error, response) =>
      error ? reject(error) : resolve(response),
    );
  });
}

const details = loader.loadSync(fileURLToPath(new URL('google_rpc.proto', import.meta.url)), {
  ...OPTIONS,
  json: true, // unpacks google.protobuf.Any
});

// The details of a failed call by type name: ErrorInfo, BadRequest, RetryInfo, RequestInfo.
export function errorDetails(error) {
  const [packed] = error.metadata?.get('grpc-status-details-bin') ?? [];
  const status = packed ? details['google.rpc.Status'].deserialize(packed) : { details: [] };
  return Object.fromEntries(status.details.map((one) => [one['@type'].split('.').pop(), one]));
}
