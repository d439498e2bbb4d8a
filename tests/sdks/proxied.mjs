// Node's fetch through the proxy that the environment names.
import { createRequire } from "node:module";

const require = createRequire(process.env.NODE_SDKS + "/");
const { EnvHttpProxyAgent, fetch } = require("undici");

const answer = await fetch(process.argv[2], { dispatcher: new EnvHttpProxyAgent() });
console.log(await answer.text());
