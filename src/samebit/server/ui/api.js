// Requests to the server that this page came from. The key lives in this tab; nothing else is kept.

const KEY = "samebit-key";

export class ApiError extends Error {
  constructor(status, text, code) {
    super(text);
    this.status = status;
    this.code = code;
  }
}

export const getKey = () => sessionStorage.getItem(KEY) ?? "";

export function setKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

async function send(path, body, signal) {
  const headers = {};
  if (getKey()) headers.Authorization = `Bearer ${getKey()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const answer = await fetch(path, {
    method,
    headers,
    signal,
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  const error = new ApiError(answer.status, told?.error?.message ?? `status ${answer.status}`, told?.error?.code);
  if (answer.status === 401) document.dispatchEvent(new CustomEvent("key-needed"));
  throw error;
}

export const getJson = async (path) => (await send(path)).json();
export const postJson = async (path, body) => (await send(path, body)).json();

// The events of a stream, as they come.
export async function* events(path, body, signal) {
  const answer = await send(path, body, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.startsWith("data: ") ? part.slice(6) : "";
      if (data === "[DONE]") return;
      if (!data) continue;
      const event = JSON.parse(data);
      if (event.error) throw new ApiError(event.error.status ?? 500, event.error.message, event.error.code);
      yield event;
    }
  }
}
