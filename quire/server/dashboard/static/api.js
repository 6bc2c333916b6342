// Asking the server: the key of this tab, JSON, and streams of events.

const KEY = "quire-key";

export class AskError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

export function headers(more = {}) {
  const found = { ...more };
  if (key.get()) found.authorization = `Bearer ${key.get()}`;
  return found;
}

async function checked(reply) {
  if (reply.ok) return reply;
  let message = `HTTP ${reply.status}`;
  try {
    message = (await reply.json()).error.message;
  } catch { /* no JSON: the status says it */ }
  throw new AskError(reply.status, message);
}

export async function getJson(path) {
  return (await checked(await fetch(path, { headers: headers(), cache: "no-store" }))).json();
}

// The data of each event of a stream, parsed, until "[DONE]".
export async function* events(path, body, signal) {
  const reply = await checked(await fetch(path, {
    method: "POST", signal, headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body),
  }));
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      for (const line of part.split("\n")) {
        if (!line.startsWith("data: ")) continue;
        if (line === "data: [DONE]") return;
        const found = JSON.parse(line.slice(6));
        if (found.error) throw new AskError(found.error.code, found.error.message);
        yield found;
      }
    }
  }
}
