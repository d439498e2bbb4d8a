// Asks for models and a chat, whole and streamed, with what the environment says.
import { createRequire } from "node:module";

// The SDKs lie under target/sdk/node, made by .ci/setup; an `import` by name would look beside this file.
const OpenAI = createRequire(`${process.env.NODE_SDKS}/package.json`)("openai").OpenAI;
const ask = { model: "gpt-4o-mini", messages: [{ role: "user", content: "Hello" }] };
const client = new OpenAI();

const models = (await client.models.list()).data.map((model) => model.id);
const whole = (await client.chat.completions.create(ask)).choices[0].message.content;
const streamed = [];
for await (const chunk of await client.chat.completions.create({ ...ask, stream: true })) {
  streamed.push(chunk.choices[0].delta.content ?? "");
}
console.log(JSON.stringify({ models, whole, streamed: streamed.join(""), parts: streamed.length }));
