// Trust first, by a CONNECT of its own; then whether fetch goes through the proxy by itself.
const http = require('node:http');
const tls = require('node:tls');
const [url, name, value] = process.argv.slice(1);
const target = new URL(url);
const proxy = new URL(process.env.HTTPS_PROXY);

function trusts() {
  return new Promise((resolve, reject) => {
    const authority = `${target.hostname}:${target.port || 443}`;
    const headers = { host: authority };
    if (proxy.username || proxy.password) {
      const pair = [proxy.username, proxy.password].map(decodeURIComponent).join(':');
      headers['proxy-authorization'] = 'Basic ' + Buffer.from(pair).toString('base64');
    }
    const at = { host: proxy.hostname.replace(/^\[|\]$/g, ''), port: proxy.port || 80 };
    const connect = http.request({ ...at, method: 'CONNECT', path: authority, headers, timeout: 8000 });
    connect.on('timeout', () => connect.destroy(new Error('no answer to CONNECT')));
    connect.on('error', reject);
    connect.on('connect', (answer, socket) => {
      if (answer.statusCode !== 200) return reject(new Error(`${answer.statusCode} ${answer.statusMessage}`));
      const inside = tls.connect({ socket, servername: target.hostname }, () => {
        inside.destroy();
        resolve();
      });
      inside.on('error', reject);
    });
    connect.end();
  });
}

(async () => {
  const said = { way: 'node', version: process.version };
  try {
    await trusts();
    said.code = '';
    const answer = await fetch(url, { headers: { [name]: value }, signal: AbortSignal.timeout(4000) });
    said.code = answer.headers.get('x-lessor-error') || '';
  } catch (error) {
    // Where fetch goes its own way, how it fares there is of no interest.
    if (said.code === undefined) said.error = `${error.code || error.name}: ${error.message}`;
  }
  console.log(JSON.stringify(said));
  process.exit(0);
})();
