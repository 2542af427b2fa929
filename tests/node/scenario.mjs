// node scenario.mjs NAME ADDRESS: runs one scenario and prints what came of it as JSON.
import grpc from '@grpc/grpc-js';
import { ask, connect, errorDetails } from './baton.mjs';

const PROMPT = { text: 'Prefill runs the first leg, decode runs the second.' };
const GREEDY = { sampling: { temperature: 0 } };
const ENDLESS = { ...PROMPT, ...GREEDY, stop: { maxTokens: 1900, ignoreEos: true } };

function failure(error) {
  return { code: grpc.status[error.code], message: error.details, ...errorDetails(error) };
}

// Reads a stream; `enough` is called after each delta and may cancel it.
async function read(client, input, { enough = () => {}, timeoutMs = 20_000 } = {}) {
  const call = client.StreamGenerate({ input }, { deadline: Date.now() + timeoutMs });
  const seen = { started: null, texts: [], tokenIds: [], finished: null, error: null };
  try {
    for await (const event of call) {
      if (event.event === 'started') seen.started = event.started;
      if (event.event === 'finished') seen.finished = event.finished;
      if (event.event !== 'delta') continue;
      seen.texts.push(event.delta.text);
      seen.tokenIds.push(...event.delta.tokenIds);
      enough(seen, call);
    }
  } catch (error) {
    seen.error = failure(error);
  }
  return seen;
}

const scenarios = {
  async whole(client) {
    const streamed = await read(client, { ...PROMPT, ...GREEDY, stop: { maxTokens: 24 } });
    const request = { input: { ...PROMPT, ...GREEDY, stop: { maxTokens: 24 } } };
    const { choices } = await ask(client, 'Generate', request);
    const { models } = await ask(client, 'ListModels', {});
    const { tokenIds } = await ask(client, 'Tokenize', PROMPT);
    return { streamed, unary: choices[0].output.text, models, tokenIds };
  },

  async cancel(client) {
    const enough = (seen, call) => seen.tokenIds.length >= 5 && call.cancel();
    return read(client, ENDLESS, { enough });
  },

  async deadline(client) {
    return read(client, ENDLESS, { timeoutMs: 400 });
  },

  async wrong(client) {
    const sampling = { topP: 2, temperature: -1 };
    return read(client, { ...PROMPT, sampling, choices: 0 });
  },

  // With the service config as shipped, and with no retries.
  async retried(client) {
    return read(client, { tokenIds: { ids: [70, 71] } });
  },

  async refused(client, address) {
    const patient = connect(address, { 'grpc.enable_retries': 0 });
    try {
      return await read(patient, { tokenIds: { ids: [70, 71] } });
    } finally {
      patient.close();
    }
  },
};

const [name, address] = process.argv.slice(2);
const client = connect(address);
try {
  process.stdout.write(JSON.stringify(await scenarios[name](client, address)));
} finally {
  client.close();
}
