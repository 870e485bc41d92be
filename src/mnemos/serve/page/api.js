// The server's HTTP interface. Errors become an ApiError whose message is one sentence.
import { remember, remembered } from "./dom.js";

const KEY = "mnemos-key";
let key = remembered(sessionStorage, KEY);
let askForKey = async () => null; // (whether a key was tried) -> the key, or null
let asking = null;

export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function onKeyNeeded(ask) {
  askForKey = ask;
}

export const hasKey = () => Boolean(key);

export function setKey(value) {
  key = value || null;
  remember(sessionStorage, KEY, key);
}

// One dialog for all requests that wait for a key.
async function freshKey(tried) {
  if (tried !== key) return key;
  asking ??= askForKey(Boolean(tried)).finally(() => { asking = null; });
  const given = await asking;
  if (given) setKey(given);
  return given;
}

const at = (path) => new URL(path, document.baseURI);
const session = (id) => `v1/sessions/${encodeURIComponent(id)}`;

async function send(method, path, { json, body, signal } = {}) {
  for (;;) {
    const used = key, headers = {};
    if (used) headers.Authorization = `Bearer ${used}`;
    if (json !== undefined) headers["Content-Type"] = "application/json";
    else if (body !== undefined) headers["Content-Type"] = "application/octet-stream";
    let response;
    try {
      response = await fetch(at(path), { method, headers, body: json === undefined ? body : JSON.stringify(json), signal, cache: "no-store", credentials: "same-origin", redirect: "error" });
    } catch (wrong) {
      if (wrong.name === "AbortError") throw wrong;
      throw new ApiError("The server does not answer: check that it is running, then try again.");
    }
    if (response.ok) return response;
    const problem = await described(response);
    if (response.status !== 401 || !(await freshKey(used))) throw problem;
  }
}

async function described(response) {
  let found = null;
  try { found = (await response.json()).error; } catch { /* not JSON: a proxy's page */ }
  const message = typeof found?.message === "string" && found.message ? found.message : `The server answered with status ${response.status}.`;
  return new ApiError(message, response.status, found?.code ?? null);
}

async function json(method, path, value, signal) {
  const response = await send(method, path, { json: value, signal });
  try { return await response.json(); } catch { throw new ApiError("The server's answer is not valid JSON: check that this page comes from a Mnemos server."); }
}

export const info = () => json("GET", "v1/info");
export const models = () => json("GET", "v1/models");
export const sessions = async () => (await json("GET", "v1/sessions")).data ?? [];
export const open = (id) => json("GET", session(id));
export const rename = (id, title) => json("PATCH", session(id), { title });
export const remove = (id) => json("DELETE", session(id));
export const fork = (id, name) => json("POST", `${session(id)}/fork`, name ? { id: name } : {});
export const undo = (id) => json("POST", `${session(id)}/undo`, {});
export const trace = (id, signal) => json("GET", `${session(id)}/trace`, undefined, signal);

export async function exported(id) {
  return (await send("GET", `${session(id)}/export`)).blob();
}

export async function imported(id, file) {
  const response = await send("POST", `v1/sessions/import?id=${encodeURIComponent(id)}`, { body: file });
  return response.json();
}

// Server-sent events: the data of each one, until [DONE].
async function* events(stream) {
  const decoder = new TextDecoder(), reader = stream.getReader();
  let rest = "", data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += done ? `${decoder.decode()}\n\n` : decoder.decode(value, { stream: true });
      const lines = rest.split(/\r\n|\n|\r(?=[^\n])/);
      rest = lines.pop();
      for (const line of lines) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) {
          const text = data.join("\n");
          data = [];
          if (text === "[DONE]") return;
          yield text;
        }
      }
      if (done) throw new ApiError("The connection ended before the answer did.");
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The chunks of a streamed chat completion.
export async function* complete(request, signal) {
  const response = await send("POST", "v1/chat/completions", { json: { ...request, stream: true, stream_options: { include_usage: true } }, signal });
  try {
    for await (const text of events(response.body)) {
      let chunk;
      try { chunk = JSON.parse(text); } catch { throw new ApiError("The server sent a piece of the answer that is not valid JSON."); }
      if (chunk.error) throw new ApiError(chunk.error.message || "The server ended the answer with an error.", 0, chunk.error.code);
      yield chunk;
    }
  } catch (wrong) {
    if (wrong instanceof ApiError || wrong.name === "AbortError") throw wrong;
    throw new ApiError("The connection to the server broke off during the answer.");
  }
}
