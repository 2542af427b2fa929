// Structured output and tools over gRPC, from protos/ alone: node forms.mjs ADDRESS
import { ask, connect } from './baton.mjs';

const client = connect(process.argv[2]);
const messages = [{ role: 'ROLE_USER', content: 'What is the weather in Paris?' }];
const parameters = JSON.stringify({
  type: 'object',
  properties: { city: { type: 'string', maxLength: 12 } },
  required: ['city'],
  additionalProperties: false,
});
const stop = { maxTokens: 64 };
const once = { parallelToolCalls: false, reasoningEffort: 'none' };
const sampling = { seed: 4 };

const formed = await ask(client, 'Generate', {
  input: {
    chat: { messages, ...once },
    structure: { jsonSchema: { schema: parameters, strict: true } },
    sampling,
    stop,
  },
});
const chat = {
  messages,
  tools: [{ name: 'get_weather', parameters, strict: true }],
  toolChoice: { mode: 'TOOL_MODE_REQUIRED' },
  ...once,
};
const whole = await ask(client, 'Generate', { input: { chat, sampling, stop } });
let streamed = '';
for await (const event of client.StreamGenerate({ input: { chat, sampling, stop } })) {
  for (const call of event.delta?.message?.toolCalls ?? []) streamed += call.arguments;
}
const [call] = whole.choices[0].message.toolCalls;
console.log(
  JSON.stringify({
    formed: JSON.parse(formed.choices[0].output.text),
    finish: whole.choices[0].finishReason,
    name: call.name,
    called: JSON.parse(call.arguments),
    same: streamed === call.arguments,
  }),
);
client.close();
