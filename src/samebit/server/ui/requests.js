// The latest requests: how long each waited, which steps computed its prompt, and how its answer was drawn.

import { postJson } from "./api.js";
import { last, settings } from "./chat.js";
import { count, element, fill, place, plural, poll, save, seconds } from "./dom.js";
import { kindsOf } from "./tokens.js";

const EVERY_MS = 1000;
const MOST_ROWS = 300;
const MOST_BOXES = 1500;
let view = null;
let chosen = null;
let whole = null;

const endOf = (request) =>
  request.ended_s ?? Math.max(request.admitted_s ?? 0, ...request.steps.map((step) => step.end_s));

function timeStrip(request, most) {
  const queued = place(element("i", "queue"), 0, request.admitted_s ?? endOf(request), most);
  const steps = request.steps
    .slice(-MOST_BOXES)
    .map((step) =>
      place(
        element("i", step.kind, [], { title: `${step.kind}: ${seconds(step.end_s - step.start_s)}` }),
        step.start_s,
        step.end_s,
        most,
      ),
    );
  return element("span", "strip time", [queued, ...steps]);
}

// The prompt's tokens, the cached ones hatched, one box a chunk, and those of the answer as they were drawn.
function tokenStrip(request, most) {
  const boxes = [place(element("i", "cached"), 0, request.num_cached_tokens, most)];
  for (const step of request.steps) {
    if (step.kind === "prefill")
      boxes.push(
        place(
          element("i", "prefill"),
          step.first,
          Math.min(step.first + step.num_tokens, request.num_prompt_tokens),
          most,
        ),
      );
  }
  let at = request.num_prompt_tokens;
  for (const step of request.steps) {
    if (!step.num_drawn) continue;
    if (step.num_steps > 1 || step.num_drawn === 1) {
      boxes.push(place(element("i", step.kind === "prefill" ? "decode" : step.kind), at, at + step.num_drawn, most));
    } else {
      kindsOf([step]).forEach((kind, offset) =>
        boxes.push(place(element("i", kind), at + offset, at + offset + 1, most)),
      );
    }
    at += step.num_drawn;
  }
  return element("span", "strip tokens-strip", boxes.slice(-MOST_BOXES));
}

function row(request, mostSeconds, mostTokens) {
  const state = request.finish_reason ?? (request.admitted_s === null ? "waiting" : "running");
  const tokens = `${count(request.num_cached_tokens)} cached, ${plural(request.num_drawn_tokens, "token")} drawn`;
  const words = `${plural(request.num_prompt_tokens, "prompt token")}, ${tokens}, ${seconds(endOf(request))}, ${state}`;
  const made = element(
    "button",
    "request",
    [
      element("span", "name", [element("code", "", request.label), element("small", "", state)]),
      element("span", "strips", [tokenStrip(request, mostTokens), timeStrip(request, mostSeconds)]),
      element("span", "number", [
        `${count(request.num_cached_tokens)}/${count(request.num_prompt_tokens)} + ${count(request.num_drawn_tokens)}`,
        element("small", "", seconds(endOf(request))),
      ]),
    ],
    { type: "button", "aria-label": words, "aria-pressed": request.label === chosen, "data-label": request.label },
  );
  return element("li", "", made);
}

function stepTable(request) {
  const head = ["step", "starts", "takes", "position", "tokens", "guesses", "accepted"].map((text) =>
    element("th", "", text, { scope: "col" }),
  );
  const rows = request.steps
    .slice(0, MOST_ROWS)
    .map((step) =>
      element("tr", step.kind, [
        element("td", "", element("span", `kind ${step.kind}`, step.kind)),
        ...[
          seconds(step.start_s),
          seconds(step.end_s - step.start_s),
          count(step.first),
          count(step.num_tokens),
          step.num_drafts ? count(step.num_drafts) : "",
          step.num_drafts ? count(step.num_accepted) : "",
        ].map((text) => element("td", "", text)),
      ]),
    );
  const left = request.steps.length - rows.length;
  return element(
    "div",
    "scroll",
    [
      element("table", "", [element("thead", "", element("tr", "", head)), element("tbody", "", rows)]),
      left > 0 ? element("p", "hint", `and ${plural(left, "more step")}`) : null,
    ],
    { tabindex: 0, role: "region", "aria-label": "Steps" },
  );
}

function details() {
  const request = whole;
  if (!request) return element("p", "hint", "Choose a request to see each of its steps.");
  const queue = request.admitted_s === null ? "still waits" : `queued for ${seconds(request.admitted_s)}`;
  const reason = request.attachment?.miss_reason;
  const miss = reason ? `, nothing cached: ${reason.replaceAll("_", " ")}` : "";
  const cached = `${count(request.num_cached_tokens)} of ${plural(request.num_prompt_tokens, "prompt token")} cached`;
  const tokens = request.num_prompt_tokens + request.num_drawn_tokens;
  const trace = element("button", "", "Trace of this request", {
    type: "button",
    click: () => saveTrace(request.label),
  });
  return element("div", "", [
    element("p", "", `${request.label}: ${queue}, ${cached}${miss}, ${plural(request.steps.length, "step")}.`),
    element("div", "strips large", [tokenStrip(request, tokens), timeStrip(request, endOf(request))]),
    trace,
    stepTable(request),
  ]);
}

async function saveTrace(name) {
  save(
    name ? `trace-${name}.json` : "trace.json",
    await postJson("ui/api/trace", { ...tenant(), ...(name ? { name } : {}) }),
  );
}

function tenant() {
  const { salt } = settings();
  return salt ? { cache_salt: salt } : {};
}

function draw(panel) {
  if (!view) return;
  const shown = [...view.requests].reverse();
  const mostSeconds = Math.max(...shown.map(endOf), 1e-6);
  const mostTokens = Math.max(...shown.map((request) => request.num_prompt_tokens + request.num_drawn_tokens), 1);
  const hadFocus = document.activeElement?.dataset?.label;
  fill(panel.querySelector(".list"), [
    shown.length
      ? element(
          "ul",
          "requests",
          shown.map((request) => row(request, mostSeconds, mostTokens)),
        )
      : element("p", "hint", "No request has come yet."),
    view.num_hidden
      ? element("p", "hint", `${plural(view.num_hidden, "request")} of other tenants are not shown.`)
      : null,
  ]);
  if (hadFocus) panel.querySelector(`[data-label="${hadFocus}"]`)?.focus({ preventScroll: true });
}

function frame(panel) {
  const key = (kind, text) => element("span", "key", [element("i", kind), text]);
  fill(panel, [
    element("div", "bar-of-tools", [
      element("button", "", "Trace of all (Chrome, Perfetto)", { type: "button", click: () => saveTrace(null) }),
      element("p", "legend", [
        key("queue", "queue"),
        key("cached", "cached prompt"),
        key("prefill", "prefill"),
        key("decode", "decode"),
        key("verify", "verify"),
        key("accepted", "accepted"),
        key("corrected", "corrected"),
        key("publish", "publish"),
      ]),
    ]),
    element("p", "hint", "Of each request: its tokens above, its time since arrival below."),
    element("div", "list"),
    element("section", "block", [element("h2", "", "Steps"), element("div", "one")]),
  ]);
  panel.onclick = (event) => {
    const made = event.target.closest("[data-label]");
    if (made) choose(panel, made.dataset.label);
  };
}

async function choose(panel, name) {
  const { requests } = await postJson("ui/api/requests", { ...tenant(), name });
  whole = requests[0] ?? null;
  chosen = whole?.label ?? null;
  fill(panel.querySelector(".one"), [details()]);
  draw(panel);
}

async function look(panel) {
  try {
    const found = await postJson("ui/api/requests", tenant());
    const isNews = JSON.stringify(found) !== JSON.stringify(view);
    view = found;
    if (isNews) draw(panel);
    if (chosen && whole?.ended_s === null) await choose(panel, chosen);
  } catch (error) {
    fill(panel.querySelector(".list"), [element("p", "error", error.message, { role: "alert" })]);
    view = null;
  }
}

export function open(panel) {
  frame(panel);
  draw(panel);
  fill(panel.querySelector(".one"), [details()]);
  if (last.name && !chosen) choose(panel, last.name).catch(() => {});
  return poll(() => look(panel), EVERY_MS);
}
