// Tokens as coloured pieces of text, and what stands behind one: its probability and those that were near.

import { byId, element, fill, percent } from "./dom.js";

const WORDS = {
  cached: "prompt, from the prefix cache",
  prefilled: "prompt, computed",
  drawn: "drawn",
  accepted: "guessed, and accepted: the model drew it",
  corrected: "drawn in the place of a wrong guess",
};

export const isControl = (text) => text.startsWith("<|") && text.endsWith("|>");

// What each token of an answer was, from the steps that drew them.
export function kindsOf(steps) {
  const kinds = [];
  for (const step of steps) {
    if (!step.num_drawn) continue;
    for (let place = 0; place < step.num_accepted; place += 1) kinds.push("accepted");
    kinds.push(step.num_accepted < step.num_drafts ? "corrected" : "drawn");
  }
  return kinds;
}

// `token`: {text, id, kind, logprob, tops: [[text, logprob], ...]}; what is only known of an answer may be left out.
export function tokenElement(token) {
  const made = element("span", "token", token.text);
  made.token = token;
  mark(made, token.kind);
  if (isControl(token.text)) made.classList.add("control");
  return made;
}

export function mark(made, kind) {
  made.token.kind = kind;
  made.classList.remove(...Object.keys(WORDS));
  made.classList.add(kind);
}

function row(text, logprob, isChosen) {
  const bar = element("span", "bar");
  bar.style.width = `${100 * Math.exp(logprob)}%`;
  return element("li", isChosen ? "chosen" : "", [
    element("code", "", JSON.stringify(text).slice(1, -1)),
    element("span", "track", bar),
    element("span", "number", percent(Math.exp(logprob))),
  ]);
}

function explain(token) {
  const tops = token.tops ?? [];
  const isNamed = tops.some(([text]) => text === token.text);
  const rows = tops.map(([text, logprob]) => row(text, logprob, text === token.text));
  if (token.logprob !== undefined && !isNamed) rows.push(row(token.text, token.logprob, true));
  const number = token.id === undefined ? "" : ` · id ${token.id}`;
  return [
    element("p", "", [element("code", "", JSON.stringify(token.text).slice(1, -1)), number]),
    element("p", `kind ${token.kind}`, WORDS[token.kind] ?? ""),
    token.logprob === undefined
      ? null
      : element("p", "number", `logprob ${token.logprob ? Number(token.logprob.toPrecision(4)) : 0}`),
    rows.length ? element("ol", "tops", rows) : null,
  ];
}

function showAt(made) {
  const popover = byId("popover");
  for (const other of document.querySelectorAll(".token.active")) other.classList.remove("active");
  made.classList.add("active");
  fill(popover, explain(made.token));
  popover.hidden = false;
  const box = made.getBoundingClientRect();
  const left = Math.min(Math.max(8, box.left), window.innerWidth - popover.offsetWidth - 8);
  const isBelow = box.bottom + popover.offsetHeight + 12 < window.innerHeight;
  popover.style.left = `${Math.max(8, left)}px`;
  popover.style.top = `${isBelow ? box.bottom + 6 : Math.max(8, box.top - popover.offsetHeight - 6)}px`;
}

export function hide() {
  byId("popover").hidden = true;
  for (const other of document.querySelectorAll(".token.active")) other.classList.remove("active");
}

// Lets a reader walk through the tokens in `list`, with a pointer or with the arrow keys.
export function explore(list) {
  list.tabIndex = 0;
  list.setAttribute("role", "group");
  list.setAttribute("aria-describedby", "popover");
  const shown = () => [...list.querySelectorAll(".token")].filter((made) => made.offsetParent !== null);
  list.addEventListener("pointerover", (event) => event.target.token && showAt(event.target));
  list.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && hide());
  list.addEventListener("click", (event) => event.target.token && showAt(event.target));
  list.addEventListener("blur", hide);
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    const tokens = shown();
    const here = tokens.findIndex((made) => made.classList.contains("active"));
    const next = here < 0 ? (step > 0 ? 0 : tokens.length - 1) : here + step;
    if (tokens[next]) {
      showAt(tokens[next]);
      tokens[next].scrollIntoView({ block: "nearest" });
    }
  });
}
