// Anthropic's client over /v1/messages, and Vercel's AI SDK: node messages.mjs URL MODEL
import { createAnthropic } from '@ai-sdk/anthropic';
import Anthropic from '@anthropic-ai/sdk';
import { generateText, streamText } from 'ai';

const [baseURL, model] = process.argv.slice(2);
const question = 'What is the capital of France?';
const messages = [{ role: 'user', content: question }];
const schema = {
  type: 'object',
  properties: { city: { enum: ['Paris', 'Rome'] } },
  required: ['city'],
  additionalProperties: false,
};
const asked = { model, temperature: 0, max_tokens: 16, messages };

const client = new Anthropic({ baseURL, apiKey: 'none', maxRetries: 0 });
const whole = await client.messages.create(asked);
const stream = client.messages.stream(asked);
let streamed = '';
stream.on('text', (text) => { streamed += text; });
await stream.finalMessage();
const tools = [{ name: 'look', input_schema: schema }];
const choice = { type: 'any', disable_parallel_tool_use: true };
const called = await client.messages
  .stream({ ...asked, max_tokens: 64, tools, tool_choice: choice })
  .finalMessage();
const thought = await client.messages.create({ ...asked, thinking: { type: 'enabled', budget_tokens: 4 } });

const sdk = createAnthropic({ baseURL: `${baseURL}/v1`, apiKey: 'none' })(model);
const options = { model: sdk, temperature: 0, maxOutputTokens: 16, maxRetries: 0, prompt: question };
const text = await generateText(options);
let joined = '';
for await (const part of streamText(options).textStream) joined += part;
console.log(
  JSON.stringify({
    whole: whole.content[0].text,
    streamed,
    called: called.content[0].input,
    finish: called.stop_reason,
    thought: thought.content.map((block) => block.type),
    sdk: text.text,
    sdkStreamed: joined,
  }),
);
