// Talks over one socket as a browser's code does, with undici's WebSocket, through the proxy that the
// environment names if it names one.
import { createRequire } from "node:module";

const require = createRequire(process.env.NODE_SDKS + "/");
const { EnvHttpProxyAgent, WebSocket } = require("undici");

const protocols = ["realtime", "openai-insecure-api-key.placeholder"];
const socket = new WebSocket(process.argv[2], { protocols, dispatcher: new EnvHttpProxyAgent() });
const events = [];
socket.onmessage = ({ data }) => {
  events.push(JSON.parse(data).type);
  if (events.length === 1) socket.send(JSON.stringify({ type: "session.update" }));
  if (events.length === 2) socket.close(1000, "done");
};
socket.onerror = ({ error, message }) => console.error(message, error);
socket.onclose = ({ code, wasClean }) =>
  console.log(JSON.stringify({ events, code, wasClean, protocol: socket.protocol }));
