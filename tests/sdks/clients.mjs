// One HTTP client of Node, named first, asks for each address after it with what the environment says.
// Prints a line for each: `answered ADDRESS BODY` or `failed ADDRESS REASON`.
import https from "node:https";
import { createRequire } from "node:module";

// They lie under target/sdk/node, made by .ci/setup; an `import` by name would look beside this file.
const require = createRequire(`${process.env.NODE_SDKS}/package.json`);

async function body(answer) {
  const text = await answer.text();
  if (!answer.ok) throw new Error(`${answer.status} ${text}`);
  return text;
}

const clients = {
  fetch: async (url) => body(await fetch(url)),

  https: (url) =>
    new Promise((resolve, reject) => {
      const asked = https.get(url, { timeout: 20_000 }, (answer) => {
        let text = "";
        answer.setEncoding("utf8").on("data", (part) => (text += part)).on("error", reject);
        answer.on("end", () => (answer.statusCode === 200 ? resolve(text) : reject(new Error(text))));
      });
      asked.on("timeout", () => asked.destroy(new Error("no answer in 20 s"))).on("error", reject);
    }),

  async undici_env(url) {
    const { EnvHttpProxyAgent, fetch } = require("undici");
    return body(await fetch(url, { dispatcher: new EnvHttpProxyAgent() }));
  },

  async undici_proxy(url) {
    const { ProxyAgent, fetch } = require("undici");
    return body(await fetch(url, { dispatcher: new ProxyAgent(process.env.HTTPS_PROXY) }));
  },

  async axios(url) {
    const axios = require("axios");
    return (await axios.get(url, { timeout: 20_000, responseType: "text", transformResponse: (text) => text })).data;
  },

  // An empty address is the environment's.
  async openai(url) {
    const { OpenAI } = require("openai");
    const client = new OpenAI({ baseURL: url.replace(/\/models$/, "") || undefined, maxRetries: 0, timeout: 20_000 });
    return JSON.stringify((await client.models.list()).data);
  },

  async anthropic(url) {
    const { Anthropic } = require("@anthropic-ai/sdk");
    const baseURL = url.replace(/\/v1\/messages$/, "") || undefined;
    const client = new Anthropic({ baseURL, maxRetries: 0, timeout: 20_000 });
    const messages = [{ role: "user", content: "Hello" }];
    return JSON.stringify(await client.messages.create({ model: "claude-test", max_tokens: 16, messages }));
  },
};

// What is said, and what is said of its cause: SDKs hide a refused certificate behind theirs.
function reason(error) {
  const said = [];
  for (let at = error; at && said.length < 8; at = at.cause) said.push(`${at.code ?? at.name}: ${at.message}`);
  return said.join(" <- ");
}

const [name, ...urls] = process.argv.slice(2);
for (const url of urls) {
  const [result, text] = await clients[name](url).then(
    (text) => ["answered", text],
    (error) => ["failed", reason(error)],
  );
  console.log(result, url || "-", text.replace(/\s+/g, " "));
}
process.exit(0); // kept connections would keep the process
