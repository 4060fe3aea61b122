// The prefix tree as an icicle chart: tokens from left to right, siblings below each other.

import { postJson } from "./api.js";
import { last, settings } from "./chat.js";
import { byId, count, element, fill, place, plural, poll } from "./dom.js";

const EVERY_MS = 1500;
const ROW_PX = 40;
const KINDS = {
  grid: "at a multiple of the interval",
  prompt_end: "at the end of a prompt",
  fork: "where prompts part",
  response_end: "at the end of an answer",
  preempted: "of a request that had to wait",
};
// Why nothing was found, by the names that metrics and answers have for it.
const MISSES = {
  cold: "Nobody has asked for it before, or not for long.",
  salt: "Nothing is cached under its cache_salt.",
  no_checkpoint: "Its beginning is cached, but it leaves that before the first checkpoint.",
  window_evicted: "Its pages are cached, but what the window and the convolutions need had to make room.",
  evicted: "It was cached, and had to make room.",
  shorter_than_page: "It has no full page before its last token.",
  prompt_logprobs: "Its tokens are to be scored, and cached ones have no logits.",
  effort_changed: "The conversation was had before with another reasoning effort, which stands at its beginning.",
};
let view = null;
let chosen = null;
let whose = "mine";
let isAdmin = false;

// Rows of each span: leaves get one each, parents all rows of their children. Children come behind their parents.
export function layOut(spans) {
  const children = spans.map(() => []);
  const tops = [];
  spans.forEach((span, index) => (span.parent < 0 ? tops : children[span.parent]).push(index));
  const places = spans.map(() => null);
  const sizes = spans.map(() => 1);
  for (let index = spans.length - 1; index >= 0; index -= 1) {
    if (children[index].length) sizes[index] = children[index].reduce((sum, child) => sum + sizes[child], 0);
  }
  let next = 0;
  for (const top of tops) {
    places[top] = next;
    next += sizes[top];
  }
  spans.forEach((_, index) => {
    let row = places[index];
    for (const child of children[index]) {
      places[child] = row;
      row += sizes[child];
    }
  });
  return { places, sizes, levels: [], numRows: next };
}

const end = (span) => span.start + span.num_tokens;
const tenantName = (tenant) => (tenant.label ? `tenant ${tenant.label}` : "without a salt");

function stripes(span) {
  const windows = Object.values(span.checkpoint?.window_pages ?? {});
  const has = (isThere) => (isThere ? "there" : "gone");
  return element("span", "stripes", [
    element("i", `full ${has(span.has_full_pages)}`),
    element("i", `window ${has(windows.some((number) => number))}`),
    element("i", `conv ${has(span.checkpoint)}`),
  ]);
}

// Where the request attached, and how far it was cached beyond that, as far as that lies in one span.
function marksIn(index) {
  const { attachment, attached_span: attached, matched_span: matched } = view;
  const found = [];
  if (attachment && matched === index && attachment.num_matched > attachment.num_attached)
    found.push(["matched", attachment.num_matched, "cached up to here"]);
  if (attachment && attached === index) found.push(["attached", attachment.num_attached, "attached here"]);
  return found;
}

function spanElement(index, layout, most) {
  const span = view.spans[index];
  const text = span.text ?? "";
  const kept = span.checkpoint ? `, checkpoint ${KINDS[span.checkpoint.kind]}` : "";
  const words = `${plural(span.num_tokens, "token")}, ${plural(span.num_hits, "hit")}${kept}`;
  const level = span.parent < 0 ? 1 : layout.levels[span.parent] + 1;
  layout.levels[index] = level;
  const made = element(
    "button",
    "span",
    [
      element("span", "label", [element("b", "", count(span.num_tokens)), " ", text.replaceAll("\n", "↵")]),
      stripes(span),
    ],
    {
      type: "button",
      role: "treeitem",
      "aria-label": words,
      "aria-level": level,
      "aria-selected": String(index === chosen),
      "data-index": index,
      tabindex: index === (chosen ?? 0) ? 0 : -1,
    },
  );
  place(made, span.start, end(span), most);
  made.style.top = `${layout.places[index] * ROW_PX}px`;
  made.style.height = `${layout.sizes[index] * ROW_PX - 2}px`;
  made.style.setProperty("--heat", Math.min(1, Math.log2(1 + span.num_hits) / 6));
  if (index === chosen) made.classList.add("chosen");
  if (span.checkpoint) made.classList.add("has-checkpoint");
  return made;
}

function chart() {
  const layout = layOut(view.spans);
  const most = Math.max(...view.spans.map(end), view.attachment?.num_possible ?? 0, 1);
  const box = element(
    "div",
    "icicle",
    view.spans.map((_, index) => spanElement(index, layout, most)),
    { role: "tree", "aria-label": "Prefix tree" },
  );
  box.style.height = `${layout.numRows * ROW_PX}px`;
  view.spans.forEach((_, index) => {
    for (const [kind, tokens, title] of marksIn(index)) {
      const line = element("span", `mark ${kind}`, element("em", "", title));
      line.style.left = `${(100 * tokens) / most}%`;
      if (tokens > most / 2) line.classList.add("late");
      line.style.top = `${layout.places[index] * ROW_PX}px`;
      line.style.height = `${layout.sizes[index] * ROW_PX - 2}px`;
      box.append(line);
    }
  });
  const axis = element(
    "div",
    "axis",
    [0, 0.25, 0.5, 0.75, 1].map((share) => element("span", "", count(share * most))),
  );
  return element("div", "chart", [axis, box]);
}

// Why a request resumed where it did, and no deeper.
function why({ num_attached: attached, num_matched: matched, num_possible: possible, miss_reason: miss }) {
  if (miss) return `${MISSES[miss]} (${miss})`;
  if (!attached) return "There is no prefix cache (--no-enable-prefix-caching).";
  if (attached === possible)
    return "It could not be deeper: whole pages only are cached, and the last token, or those to be scored, must be computed.";
  if (matched > attached)
    return "More of it was cached, but without a checkpoint: only there are a window and the inputs of the convolutions kept.";
  return "Beyond this, nothing of it was cached.";
}

function told() {
  const { attachment } = view;
  if (!attachment) return element("p", "hint", "No request is remembered yet.");
  const { num_attached: attached, num_matched: matched, num_possible: possible } = attachment;
  const which = whose === "mine" && last.name ? "Your last request" : "The last request";
  const where = attached ? `resumed at token ${count(attached)}` : "began at its first token";
  const more = matched > attached ? `, although ${count(matched)} were cached` : "";
  return element("p", "told", `${which} ${where} of ${count(possible)} possible${more}. ${why(attachment)}`, {
    id: "told",
  });
}

function details() {
  const span = view.spans[chosen];
  if (!span) return element("p", "hint", "Choose a span to see more of it. Arrow keys walk through the tree.");
  const { checkpoint } = span;
  const windows = Object.entries(checkpoint?.window_pages ?? {}).map(
    ([size, number]) => `${plural(number, "page")} of window ${size}`,
  );
  const facts = [
    ["Tokens", `${count(span.start)} to ${count(end(span))}`],
    ["Tenant", tenantName(view.tenants[span.tenant])],
    ["Hits here and below", count(span.num_hits)],
    [
      "Checkpoint",
      checkpoint
        ? `${KINDS[checkpoint.kind]}, ${plural(checkpoint.num_hits, "hit")}${checkpoint.is_in_use ? ", in use" : ""}`
        : "none: nothing resumes here",
    ],
    [
      "Kept",
      [span.has_full_pages ? "full attention" : null, ...windows, checkpoint ? "inputs of the convolutions" : null]
        .filter(Boolean)
        .join(", "),
    ],
  ];
  return element("div", "", [
    element(
      "dl",
      "",
      facts.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]),
    ),
    element("pre", "", span.text ?? "The text is shown to the operator, and to the tenant itself, by its salt."),
  ]);
}

function choose(index) {
  chosen = index;
  draw(byId("cache"));
  document.querySelector(`[data-index="${index}"]`)?.focus();
}

function onKey(event) {
  if (event.target.getAttribute("role") !== "treeitem") return;
  const here = Number(event.target.dataset.index);
  const { parent } = view.spans[here];
  const siblings = view.spans.map((_, index) => index).filter((index) => view.spans[index].parent === parent);
  const steps = {
    ArrowRight: () => view.spans.findIndex((span) => span.parent === here),
    ArrowLeft: () => parent,
    ArrowDown: () => siblings[siblings.indexOf(here) + 1],
    ArrowUp: () => siblings[siblings.indexOf(here) - 1],
  };
  const next = steps[event.key]?.();
  if (!steps[event.key]) return;
  event.preventDefault();
  if (next !== undefined && next >= 0) choose(next);
}

function draw(panel) {
  if (!view) return;
  const hadFocus = document.activeElement?.dataset?.index;
  const tenants = view.tenants.map(
    (tenant) =>
      `${tenantName(tenant)}: ${plural(tenant.num_tokens, "token")}, ${plural(tenant.num_checkpoints, "checkpoint")}${tenant.is_shown ? "" : " (not shown)"}`,
  );
  fill(panel.querySelector(".drawing"), [
    told(),
    view.spans.length ? chart() : element("p", "hint", "The cache is empty. Ask something that is longer than a page."),
    view.is_cut ? element("p", "hint", "The cache is larger than what is shown.") : null,
    element("section", "block", [element("h2", "", "Span"), details()]),
    element(
      "p",
      "hint",
      `${tenants.join(" · ")} · pages of ${plural(view.page_size, "token")}, checkpoints every ${count(view.checkpoint_interval)}`,
    ),
  ]);
  if (hadFocus !== undefined) panel.querySelector(`[data-index="${hadFocus}"]`)?.focus({ preventScroll: true });
}

function frame(panel) {
  const choice = (value, text) =>
    element("label", "check", [
      element("input", "", [], { type: "radio", name: "whose", value, checked: whose === value }),
      ` ${text}`,
    ]);
  const key = (kind, text) => element("span", "key", [element("i", kind), text]);
  const choices = element("fieldset", "choices", [
    element("legend", "", "Show where it attached"),
    choice("mine", "my last request"),
    choice("any", "anybody's"),
  ]);
  choices.addEventListener("change", (event) => {
    whose = event.target.value;
    look(panel);
  });
  fill(panel, [
    element("div", "bar-of-tools", [
      choices,
      element("p", "legend", [
        key("full there", "full attention"),
        key("window there", "window"),
        key("conv there", "convolutions"),
        key("heat", "more hits"),
        key("line", "attached here"),
      ]),
    ]),
    element("div", "drawing"),
    element("button", "empty-cache", "Empty the cache", {
      type: "button",
      hidden: !isAdmin,
      click: () => flush(panel),
    }),
  ]);
  panel.onclick = (event) => {
    const made = event.target.closest("[data-index]");
    if (made) choose(Number(made.dataset.index));
  };
  panel.onkeydown = onKey;
}

async function flush(panel) {
  await postJson("flush_cache", {});
  await look(panel);
}

// The same span in a newer view.
function find(old, spans) {
  const same = (span) => span.start === old.start && span.tenant === old.tenant && span.text === old.text;
  const index = old ? spans.findIndex(same) : -1;
  return index < 0 ? null : index;
}

document.addEventListener("seen", (event) => {
  isAdmin = event.detail.is_admin;
  const button = byId("cache").querySelector(".empty-cache");
  if (button) button.hidden = !isAdmin;
});

async function look(panel) {
  const body = {};
  const { salt } = settings();
  if (salt) body.cache_salt = salt;
  if (whose === "mine" && last.name) body.name = last.name;
  try {
    const found = await postJson("ui/api/cache", body);
    if (JSON.stringify(found) === JSON.stringify(view)) return;
    chosen = view && chosen !== null ? find(view.spans[chosen], found.spans) : null;
    view = found;
    draw(panel);
  } catch (error) {
    fill(panel.querySelector(".drawing"), [element("p", "error", error.message, { role: "alert" })]);
    view = null;
  }
}

export function open(panel) {
  frame(panel);
  draw(panel);
  return poll(() => look(panel), EVERY_MS);
}
