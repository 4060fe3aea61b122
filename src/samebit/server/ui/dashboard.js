// Numbers of /metrics as cards, curves and bars. Every card names its metric, and shows nothing that /metrics does not say.

import { byId, count, element, fill, percent, plural, seconds } from "./dom.js";

const NUM_POINTS = 120;
const CURVES = [
  ["samebit:gen_throughput", "Tokens a second", (value) => value.toFixed(value < 10 ? 1 : 0)],
  ["samebit:num_running_reqs", "Running requests", count],
  ["samebit:num_queue_reqs", "Waiting requests", count],
  ["samebit:cache_hit_rate", "Prompt tokens from the cache", percent],
  ["samebit:spec_accept_length", "Tokens of a verified row", (value) => value.toFixed(2)],
];
const TOTALS = [
  ["samebit:prompt_tokens_total", "Prompt tokens"],
  ["samebit:cached_tokens_total", "of them cached"],
  ["samebit:generation_tokens_total", "Generated tokens"],
  ["samebit:spec_decode_num_draft_tokens_total", "Guessed tokens"],
  ["samebit:spec_decode_num_accepted_tokens_total", "of them accepted"],
  ["samebit:published_checkpoints_total", "Checkpoints published"],
  ["samebit:evicted_tokens_total", "Tokens evicted"],
  ["samebit:num_preemptions_total", "Preemptions"],
];
const MUST_BE_ZERO = [
  ["samebit:failed_steps_total", "Failed steps"],
  ["samebit:refused_checkpoints_total", "Refused checkpoints"],
  ["samebit:damaged_resumes_total", "Damaged resumes"],
  ["samebit:engine_losses_total", "Lost engines"],
  ["samebit:audit_mismatches_total", "Audit mismatches"],
];
const POOLS = [
  ["samebit:full_token_usage", "Pages of full attention", "pages_full"],
  ["samebit:swa_token_usage", "Window pages", null],
  ["samebit:conv_usage", "Checkpoints", "checkpoints"],
];
const TIMES = [
  ["samebit:time_to_first_token_seconds", "First token"],
  ["samebit:inter_token_latency_seconds", "Next token"],
  ["samebit:queue_time_seconds", "Queue"],
  ["samebit:e2e_request_latency_seconds", "Whole request"],
];
const history = Object.fromEntries(CURVES.map(([name]) => [name, []]));
const SVG = "http://www.w3.org/2000/svg";
let seen = null;

function card(name, title, text) {
  return element("div", "card", [element("h3", "", title), element("output", "", text, { "data-metric": name })]);
}

function curve(values) {
  const most = Math.max(...values, 1e-9);
  const points = values.map(
    (value, place) => `${((place + NUM_POINTS - values.length) * 100) / (NUM_POINTS - 1)},${29 - (28 * value) / most}`,
  );
  const drawn = document.createElementNS(SVG, "svg");
  drawn.setAttribute("viewBox", "0 0 100 30");
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.setAttribute("class", "curve");
  drawn.setAttribute("aria-hidden", "true");
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.join(" "));
  drawn.append(line);
  return drawn;
}

function bar(title, share, note, attributes = {}) {
  const inner = element("span", "bar");
  inner.style.width = `${Math.min(100, 100 * share)}%`;
  return element("li", "", [
    element("span", "name", title),
    element("span", "track", inner),
    element("span", "number", note, attributes),
  ]);
}

// The value below which a share of all values lies, as exactly as the buckets tell.
export function quantile(histogram, share) {
  const rank = share * histogram.count;
  let below = 0;
  let from = 0;
  for (const [to, number] of histogram.buckets) {
    if (number >= rank && number > below)
      return to === null ? from : from + ((to - from) * (rank - below)) / (number - below);
    below = number;
    from = to ?? from;
  }
  return from;
}

function times() {
  const rows = TIMES.map(([name, title]) => {
    const histogram = seen.histograms[name];
    const cells = [0.5, 0.95, 0.99].map((share) => (histogram?.count ? seconds(quantile(histogram, share)) : "–"));
    const mean = histogram?.count ? seconds(histogram.sum / histogram.count) : "–";
    return element("tr", "", [
      element("th", "", title, { scope: "row" }),
      ...[mean, ...cells].map((cell) => element("td", "", cell)),
    ]);
  });
  const head = ["", "mean", "half", "95 %", "99 %"].map((text) => element("th", "", text, { scope: "col" }));
  return element("table", "", [element("thead", "", element("tr", "", head)), element("tbody", "", rows)]);
}

function acceptance() {
  const name = "samebit:spec_decode_num_accepted_tokens_per_pos_total";
  const rows = seen.metrics["samebit:spec_decode_num_drafts_total"];
  const places = Object.entries(seen.labelled[name] ?? {}).sort((one, other) => one[0] - other[0]);
  if (!seen.num_speculative_tokens) return element("p", "hint", "Nobody guesses tokens here (--speculative-config).");
  if (!rows) return element("p", "hint", "No guess has been verified yet.");
  const bars = places.map(([place, number]) =>
    bar(`guess ${Number(place) + 1}`, number / rows, percent(number / rows), {
      title: `${count(number)} of ${plural(rows, "row")}`,
      "data-value": number,
    }),
  );
  return element("ol", "bars", bars);
}

function misses() {
  const found = Object.entries(seen.labelled["samebit:cache_miss_reason_total"] ?? {}).filter(([, number]) => number);
  const most = Math.max(...found.map(([, number]) => number), 1);
  if (!found.length) return element("p", "hint", "No prompt has missed the cache.");
  return element(
    "ul",
    "bars",
    found.map(([reason, number]) => bar(reason.replaceAll("_", " "), number / most, count(number))),
  );
}

function pools() {
  return element(
    "ul",
    "bars",
    POOLS.map(([name, title, pool]) => {
      const total = pool && seen.pools[pool];
      return bar(total ? `${title} (${count(total)})` : title, seen.metrics[name], percent(seen.metrics[name]), {
        "data-metric": name,
      });
    }),
  );
}

function ends() {
  const found = Object.entries(seen.labelled["samebit:num_requests_total"] ?? {});
  const total = found.reduce((sum, [, number]) => sum + number, 0);
  if (!total) return element("p", "hint", "No request has ended yet.");
  return element(
    "ul",
    "bars",
    found.map(([reason, number]) => bar(reason, number / total, count(number))),
  );
}

function block(title, content) {
  return element("section", "block", [element("h2", "", title), content]);
}

function draw(panel) {
  if (!seen) return;
  const value = (name) => seen.metrics[name] ?? 0;
  const curves = CURVES.map(([name, title, text]) => {
    const made = card(name, title, text(value(name)));
    made.append(curve(history[name]));
    return made;
  });
  const zeros = MUST_BE_ZERO.map(([name, title]) => {
    const made = card(name, title, count(value(name)));
    made.classList.add(value(name) ? "bad" : "good");
    return made;
  });
  fill(panel, [
    element("div", "cards", curves),
    element("div", "blocks", [
      block("Pools", pools()),
      block("Acceptance by position", acceptance()),
      block("Times", times()),
      block("Why the cache missed", misses()),
      block("How requests ended", ends()),
    ]),
    element("h2", "", "Totals"),
    element(
      "div",
      "cards small",
      TOTALS.map(([name, title]) => card(name, title, count(value(name)))),
    ),
    element("h2", "", "What must stay 0"),
    element("div", "cards small", zeros),
    element(
      "p",
      "hint",
      `${seen.model} · samebit ${seen.version} · ${seen.system_fingerprint} · ${Object.values(seen.profile).join(" · ")}`,
    ),
  ]);
}

document.addEventListener("seen", (event) => {
  seen = event.detail;
  for (const [name] of CURVES) {
    history[name].push(seen.metrics[name] ?? 0);
    if (history[name].length > NUM_POINTS) history[name].shift();
  }
  const panel = byId("dashboard");
  if (!panel.hidden) draw(panel);
});

export function open(panel) {
  draw(panel);
}
