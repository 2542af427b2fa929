// OpenAI's client over /v1/responses, and Vercel's AI SDK, which uses it by default:
// node responses.mjs BASE_URL MODEL
import { createOpenAI } from '@ai-sdk/openai';
import { generateText, jsonSchema, stepCountIs, streamText, tool } from 'ai';
import OpenAI from 'openai';

const [baseURL, model] = process.argv.slice(2);
const question = 'What is the capital of France?';
const schema = {
  type: 'object',
  properties: { city: { enum: ['Paris', 'Rome'] } },
  required: ['city'],
  additionalProperties: false,
};
const asked = { model, temperature: 0, max_output_tokens: 16 };

const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
const whole = await client.responses.create({ ...asked, input: question });
const stream = client.responses.stream({ ...asked, input: question });
let streamed = '';
for await (const event of stream) {
  if (event.type === 'response.output_text.delta') streamed += event.delta;
}
const tools = [{ type: 'function', name: 'look', parameters: schema, strict: true }];
const called = await client.responses.create({
  ...asked, max_output_tokens: 64, input: question, tools, tool_choice: 'required', parallel_tool_calls: false,
});

const sdk = createOpenAI({ baseURL, apiKey: 'none' })(model);
const options = { model: sdk, temperature: 0, maxOutputTokens: 16, maxRetries: 0, prompt: question };
const text = await generateText(options);
const parts = streamText(options);
let joined = '';
for await (const part of parts.textStream) joined += part;
const look = tool({ inputSchema: jsonSchema(schema), execute: async () => 'It is Paris.' });
const steps = await generateText({
  ...options, maxOutputTokens: 64, tools: { look }, toolChoice: 'required', stopWhen: stepCountIs(2),
  providerOptions: { openai: { store: false, parallelToolCalls: false } },
});
console.log(
  JSON.stringify({
    whole: whole.output_text,
    streamed,
    called: JSON.parse(called.output[0].arguments),
    sdk: text.text,
    sdkStreamed: joined,
    steps: steps.steps.map((step) => step.finishReason),
  }),
);
