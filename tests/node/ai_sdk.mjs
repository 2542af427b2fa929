// The AI SDK of Vercel, unchanged: node ai_sdk.mjs BASE_URL MODEL
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, streamText, tool } from 'ai';
import { z } from 'zod';

const [baseURL, name] = process.argv.slice(2);
const baton = createOpenAICompatible({ name: 'baton', baseURL, supportsStructuredOutputs: true });
const model = baton(name);
const asked = { model, temperature: 0, maxOutputTokens: 16, maxRetries: 0 };
const prompt = 'What is the capital of France?';

const said = { chat: (await generateText({ ...asked, prompt })).text, stream: '' };
for await (const part of streamText({ ...asked, prompt }).textStream) said.stream += part;

const city = z.strictObject({ name: z.string().max(12), people: z.int().min(0).max(9_999_999) });
const about = { ...asked, maxOutputTokens: 80, prompt: 'Tell me about Paris.' };
said.parsed = (await generateText({ ...about, output: Output.object({ schema: city }) })).output;

const tools = { note: tool({ description: 'Notes a city', inputSchema: z.strictObject({ name: z.enum(['Paris', 'Rome']) }) }) };
const called = await generateText({ ...about, tools, toolChoice: { type: 'tool', toolName: 'note' } });
said.calls = called.toolCalls.map((call) => [call.toolName, call.input.name]);
said.finish = called.finishReason;
console.log(JSON.stringify(said));
