// Elements, numbers as text, and polling. Text goes into elements as text only, never as markup.

// Lets the browser take a click or draw: events that are there already follow one another without a pause. A timer would wait
// for a second in a tab that is not seen.
export function nextTask() {
  const { port1, port2 } = new MessageChannel();
  return new Promise((resolve) => {
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}

export const byId = (id) => document.getElementById(id);

// An element of class `kind`. `parts` are elements or text; `attributes` as in markup, functions as listeners.
export function element(tag, kind = "", parts = [], attributes = {}) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value);
    else if (value !== null && value !== undefined && value !== false)
      made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...[parts].flat().filter((part) => part !== null && part !== undefined));
  return made;
}

export function fill(parent, parts) {
  parent.replaceChildren(...parts.filter((part) => part !== null && part !== undefined));
}

// A box from `start` to `end` of `whole`, in percent of its parent.
export function place(box, start, end, whole) {
  box.style.left = `${(100 * start) / (whole || 1)}%`;
  box.style.width = `${(100 * Math.max(end - start, 0)) / (whole || 1)}%`;
  return box;
}

export const count = (value) => Math.round(value).toLocaleString("en-US");
export function percent(share) {
  if (share > 0 && share < 0.0005) return "<0.1 %";
  return `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

export function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.1 ? 1 : 0)} ms`;
  return `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

// Calls `look` now and every so often, while the page is seen; returns a function that ends it.
export function poll(look, everyMs) {
  let timer = 0;
  let isOver = false;
  async function turn() {
    if (document.visibilityState === "visible") await look();
    if (!isOver) timer = setTimeout(turn, everyMs);
  }
  turn();
  return () => {
    isOver = true;
    clearTimeout(timer);
  };
}

export function save(name, value) {
  const address = URL.createObjectURL(new Blob([JSON.stringify(value)], { type: "application/json" }));
  element("a", "", [], { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
