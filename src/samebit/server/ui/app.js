// The frame: which view is open, the theme, the key, and whether the server answers.

import { ApiError, getJson, getKey, setKey } from "./api.js";
import * as cache from "./cache.js";
import * as chat from "./chat.js";
import * as dashboard from "./dashboard.js";
import { byId, poll } from "./dom.js";
import * as requests from "./requests.js";

const VIEWS = { chat, dashboard, cache, requests };
const THEMES = ["auto", "light", "dark"];
const THEME = "samebit-theme";
const tabs = [...document.querySelectorAll("[role=tab]")];
let close = () => {};

function open(name) {
  close();
  for (const tab of tabs) {
    const isOpen = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", isOpen);
    tab.tabIndex = isOpen ? 0 : -1;
    byId(tab.getAttribute("aria-controls")).hidden = !isOpen;
  }
  close = VIEWS[name].open(byId(name)) ?? (() => {});
  history.replaceState(null, "", `#${name}`);
}

export function show(name) {
  byId(`tab-${name}`).focus();
  open(name);
}

function onTabKey(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  const here = tabs.indexOf(event.target);
  const next =
    { Home: 0, End: tabs.length - 1 }[event.key] ?? (step ? (here + step + tabs.length) % tabs.length : null);
  if (next === null) return;
  event.preventDefault();
  tabs[next].focus();
  open(tabs[next].getAttribute("aria-controls"));
}

function useTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
  byId("theme-button").textContent = `Theme: ${theme}`;
}

function askForKey() {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  byId("key").value = getKey();
  dialog.showModal();
}

async function look() {
  const status = byId("status");
  try {
    const seen = await getJson("ui/api/dashboard");
    byId("model").textContent = seen.model;
    document.dispatchEvent(new CustomEvent("seen", { detail: seen }));
    status.textContent = seen.state === "ok" ? "live" : seen.state;
    status.dataset.state = seen.state === "ok" ? "live" : "lost";
  } catch (error) {
    status.textContent = error instanceof ApiError ? (error.status === 401 ? "needs a key" : "unwell") : "gone";
    status.dataset.state = "lost";
    status.title = error.message;
  }
}

useTheme(THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : "auto");
byId("theme-button").addEventListener("click", () => {
  const now = THEMES.indexOf(document.documentElement.dataset.theme ?? "auto");
  useTheme(THEMES[(now + 1) % THEMES.length]);
});
for (const tab of tabs) {
  tab.addEventListener("click", () => open(tab.getAttribute("aria-controls")));
  tab.addEventListener("keydown", onTabKey);
}
document.addEventListener("show", (event) => show(event.detail));
document.addEventListener("key-needed", askForKey, { once: true });
byId("key-button").addEventListener("click", askForKey);
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key-dialog").close();
  document.addEventListener("key-needed", askForKey, { once: true });
  look();
});
poll(look, 1000);
const wanted = location.hash.slice(1);
open(wanted in VIEWS ? wanted : "chat");
