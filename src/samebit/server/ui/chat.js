// The playground: a conversation token by token. It goes through /tokenize and /v1/completions, so that every token that the
// model sees or draws has its id, its logprob and its place in a step. Turns are sent back with their ids.

import { events, postJson } from "./api.js";
import { byId, count, element, fill, nextTask, plural, seconds } from "./dom.js";
import { explore, hide, isControl, kindsOf, mark, tokenElement } from "./tokens.js";

const NUM_TOPS = 5;
const KINDS_EVERY_MS = 500;
const FRAME_MS = 16;
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];

export const last = { name: null };
let turns = [];
let running = null;
let limit = Infinity;

export function settings() {
  const data = new FormData(byId("settings"));
  const found = { speculation: data.has("speculation") };
  for (const name of NUMBERS) {
    const text = data.get(name).trim();
    if (text !== "") found[name] = Number(text);
  }
  const salt = data.get("cache_salt");
  if (salt) found.cache_salt = salt;
  const effort = data.get("effort");
  const template = effort ? { chat_template_kwargs: { reasoning_effort: effort } } : {};
  return { found, system: data.get("system").trim(), salt, template };
}

function messagesFor(system) {
  const before = system ? [{ role: "system", content: system }] : [];
  return [...before, ...turns.map((turn) => turn.message)];
}

function say(text) {
  byId("messages").append(element("p", "error", text, { role: "alert" }));
}

function promptBox(tokens, texts) {
  const list = element("p", "tokens prompt-tokens");
  list.append(...texts.map((text, place) => tokenElement({ text, id: tokens[place], kind: "prefilled" })));
  explore(list);
  list.setAttribute("aria-label", "Tokens of the prompt");
  const title = element("summary", "", `Prompt: ${plural(tokens.length, "token")}`);
  return { box: element("details", "prompt", [title, list]), list, title };
}

function markCached(prompt, numCached) {
  [...prompt.list.children].forEach((made, place) => mark(made, place < numCached ? "cached" : "prefilled"));
  const total = prompt.list.children.length;
  prompt.title.textContent = `Prompt: ${plural(total, "token")}, ${count(numCached)} cached, ${count(total - numCached)} computed`;
}

// Marks what is a message's frame or its thinking, by the control tokens in it.
function mood(answer, text) {
  if (isControl(text)) answer.isThinking = /think|reason/i.test(text);
  return answer.isThinking && !isControl(text);
}

function take(answer, choice) {
  const { tokens, token_logprobs: logprobs, top_logprobs: tops } = choice.logprobs ?? { tokens: [] };
  tokens.forEach((text, place) => {
    const made = tokenElement({
      text,
      id: choice.token_ids[place],
      kind: answer.kinds[answer.ids.length] ?? "drawn",
      logprob: logprobs[place],
      tops: Object.entries(tops[place] ?? {}),
    });
    if (mood(answer, text)) made.classList.add("thinking");
    answer.list.append(made);
    answer.ids.push(choice.token_ids[place]);
  });
}

async function learnKinds(answer) {
  if (!answer.name) return;
  const { requests } = await postJson("ui/api/requests", { name: answer.name });
  if (!requests.length) return;
  const [request] = requests;
  answer.kinds = kindsOf(request.steps);
  markCached(answer.prompt, request.num_cached_tokens);
  [...answer.list.children].forEach((made, place) => answer.kinds[place] && mark(made, answer.kinds[place]));
}

async function learnWhileOpen(answer) {
  while (answer.isOpen) {
    await new Promise((resolve) => setTimeout(resolve, KINDS_EVERY_MS));
    if (answer.isOpen) await learnKinds(answer).catch(() => {});
  }
}

function summary(answer, reason) {
  const took = (performance.now() - answer.began) / 1000;
  const speed =
    answer.ids.length > 1 ? `${((answer.ids.length - 1) / (took - answer.first)).toFixed(1)} tokens/s` : null;
  const accepted = answer.kinds.filter((kind) => kind === "accepted").length;
  const words = [
    plural(answer.ids.length, "token"),
    `first after ${seconds(answer.first)}`,
    speed,
    accepted ? `${count(accepted)} guessed right` : null,
    `ended: ${reason}`,
    answer.seed === undefined ? null : `seed ${answer.seed}`,
  ];
  const steps = element("button", "link", "Steps", { type: "button" });
  steps.addEventListener("click", () => document.dispatchEvent(new CustomEvent("show", { detail: "requests" })));
  return element("p", "facts", [words.filter(Boolean).join(" · "), " ", answer.name ? steps : null]);
}

async function run(answer, body, signal) {
  let paused = performance.now();
  for await (const event of events("v1/completions", body, signal)) {
    answer.name ??= event.id;
    last.name = answer.name;
    answer.seed ??= event.seed;
    if (event.prompt_progress) markCached(answer.prompt, event.prompt_progress.cache);
    const choice = event.choices[0];
    if (choice) {
      if (choice.token_ids?.length) answer.first ??= (performance.now() - answer.began) / 1000;
      take(answer, choice);
      answer.reason = choice.finish_reason ?? answer.reason;
    }
    if (event.usage) markCached(answer.prompt, event.usage.prompt_tokens_details.cached_tokens);
    if (performance.now() - paused > FRAME_MS) {
      stick();
      await nextTask();
      signal.throwIfAborted(); // what came before the click is not shown either
      paused = performance.now();
    }
  }
}

function stick() {
  const box = byId("messages");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

async function ask(text) {
  const { found, system, template } = settings();
  const conversation = turns;
  conversation.push({ message: { role: "user", content: text } });
  byId("messages").append(element("div", "message user", text));
  const request = new AbortController();
  running = request;
  setRunning(true);
  let answer = null;
  try {
    const prompt = await postJson("tokenize", { messages: messagesFor(system), return_token_strs: true, ...template });
    limit = prompt.max_model_len;
    answer = begin(promptBox(prompt.tokens, prompt.token_strs));
    const room = Math.max(1, limit - prompt.count);
    const body = {
      ...found,
      prompt: prompt.tokens,
      max_tokens: Math.min(found.max_tokens ?? room, room),
      stream: true,
      stream_options: { include_usage: true },
      logprobs: NUM_TOPS,
      return_token_ids: true,
      return_progress: true,
      skip_special_tokens: false,
    };
    learnWhileOpen(answer);
    await run(answer, body, request.signal);
  } catch (error) {
    if (error.name === "AbortError" && answer) answer.reason = "stopped";
    else if (error.name !== "AbortError") say(error.message);
  }
  await close(answer, conversation);
  if (running === request) {
    running = null;
    setRunning(false);
  }
}

function begin(prompt) {
  const list = element("p", "tokens answer-tokens", [], { "aria-label": "Tokens of the answer" });
  explore(list);
  const box = element("div", "message assistant", [prompt.box, list]);
  byId("messages").append(box);
  stick();
  return { prompt, list, box, ids: [], kinds: [], name: null, isOpen: true, began: performance.now(), reason: "error" };
}

async function close(answer, conversation) {
  if (answer?.ids.length) {
    answer.isOpen = false;
    conversation.push({ message: { role: "assistant", token_ids: answer.ids } });
    await learnKinds(answer).catch(() => {});
    answer.box.append(summary(answer, answer.reason));
  } else {
    if (answer) answer.isOpen = false;
    answer?.box.remove();
    conversation.pop();
  }
  stick();
}

function setRunning(isRunning) {
  byId("send").disabled = isRunning;
  byId("stop").disabled = !isRunning;
  byId("messages").setAttribute("aria-busy", isRunning);
}

function empty() {
  running?.abort();
  running = null;
  setRunning(false);
  turns = [];
  hide();
  fill(byId("messages"), []);
}

export function open() {
  byId("prompt").focus({ preventScroll: true });
  return hide;
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value.trim();
  if (!text || running) return;
  byId("prompt").value = "";
  ask(text);
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    byId("composer").requestSubmit();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", empty);
byId("settings").addEventListener("submit", (event) => event.preventDefault());
byId("settings").addEventListener("change", () => {
  byId("messages").classList.toggle("with-control", new FormData(byId("settings")).has("control"));
});
if (window.matchMedia("(max-width: 60rem)").matches) byId("settings-box").open = false;
