// Asks a running server with OpenAI's client for Node: `npm install openai && node examples/openai_client.mjs`.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: "http://127.0.0.1:8000/v1", apiKey: "none" });
const messages = [
  { role: "user", content: "The access code of the amber lighthouse is 4821." },
  { role: "assistant", content: "Noted." },
  { role: "user", content: "What is the access code of the amber lighthouse?" },
];
const answer = await client.chat.completions.create({ model: "nano", messages, seed: 1 });
console.log(answer.choices[0].message.content, answer.usage.prompt_tokens_details);

const stream = await client.chat.completions.create({ model: "nano", messages, seed: 1, stream: true });
for await (const chunk of stream) process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
console.log();
