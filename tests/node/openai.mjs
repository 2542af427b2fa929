// The official client of OpenAI, unchanged: node openai.mjs BASE_URL MODEL
import OpenAI from 'openai';

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: 'none', maxRetries: 0 });
const messages = [{ role: 'user', content: 'What is the capital of France?' }];
const asked = { model, messages, temperature: 0, max_tokens: 16 };

const said = { model: (await client.models.list()).data[0].id };
said.chat = (await client.chat.completions.create(asked)).choices[0].message.content;
said.stream = '';
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  said.stream += chunk.choices[0]?.delta?.content ?? '';
}
said.text = (
  await client.completions.create({
    model,
    prompt: 'The capital of France is',
    temperature: 0,
    max_tokens: 8,
  })
).choices[0].text;
try {
  const long = [{ role: 'user', content: 'word '.repeat(20_000) }];
  await client.chat.completions.create({ ...asked, messages: long });
} catch (error) {
  said.tooLong = [error.status, error.code, error.param];
}
console.log(JSON.stringify(said));
