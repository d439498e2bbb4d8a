// Streams a chat through lessor: run with OPENAI_BASE_URL=http://127.0.0.1:8321/openai/v1 OPENAI_API_KEY=placeholder
import OpenAI from "openai";

const client = new OpenAI();
const stream = await client.chat.completions.create({
  model: "gpt-4o-mini",
  messages: [{ role: "user", content: "Say hello." }],
  stream: true,
});
for await (const chunk of stream) {
  process.stdout.write(chunk.choices[0]?.delta?.content ?? "");
}
console.log();
