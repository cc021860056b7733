// The page: asks the proxy every second and shows what it says; says so when it says nothing.

import { get, Gone, login, Refused, Unauthorized } from "./api.js";
import { Chart, niceTopS } from "./charts.js";
import { byId, setText } from "./dom.js";
import { showErrors } from "./errors.js";
import { count, duration, percent, short, whole } from "./format.js";
import { Programs } from "./programs.js";
import { QUEUE_LIMIT, showQueue } from "./queue.js";
import { showReplicas } from "./replicas.js";
import { Story } from "./story.js";

const PERIOD_MS = 1000;
const RETRY_MS = [1000, 2000, 3000, 5000];
const SMOOTH_S = 15;
const KEPT_S = 15 * 60;
const COSTS = [["decode", "reasoning"], ["prefill", "prefill"], ["recompute", "over"], ["caching", "acting"], ["unused", "unused"]];

let samples = [];
let latest = null;
let startedAt = null;
let windowS = 300;
let failures = 0;
let timer = 0;
let asking = false;
let askAgain = false;

const story = new Story();
const programs = new Programs(() => askNow(), (id, pool) => story.open(id, pool));
const ERRORS = [["failed", "over"], ["errored", "other"], ["refused", "held"], ["rejected", "prefill"], ["abandoned", "paused"]];
const PERCENTILES = [{ name: "median", colour: "reasoning" }, { name: "p90", colour: "held" }, { name: "p99", colour: "over" }];
const GATEWAYS_KNOW = "Gateways measure this: see their /metrics";

/** Percentiles over time, of a part of a sample. */
function latency(title, unit, values, { none = "No turn lately", more = [] } = {}) {
  return {
    chart: new Chart({ title, unit, format: duration, nice: niceTopS, none, series: [...PERCENTILES, ...more] }),
    rows: (all) => all.map((now) => row(now, values(now))),
    ofGateways: true,
  };
}

const charts = [
  latency("First token", "of streams", ({ first_token: of }) => [of.p50_s, of.p90_s, of.p99_s], { none: "No stream lately" }),
  latency("Turn", "to its end", ({ turn: of }) => [of.p50_s, of.p90_s, of.p99_s]),
  {
    ...latency("Held", "before its lease", (now) => [now.held_p50_s, now.held_p90_s, now.held_p99_s, now.longest_held_s],
      { more: [{ name: "now, longest", colour: "other" }] }),
    ofGateways: false,
  },
  {
    chart: new Chart({ title: "Programs", unit: "live", stacked: true, format: short, series: [
      { name: "reasoning", colour: "reasoning" }, { name: "acting", colour: "acting" }, { name: "held", colour: "held" }, { name: "paused", colour: "paused" },
    ] }),
    rows: (all) => all.map((now) => row(now, [now.active_reasoning_count, now.active_acting_count, now.paused_reasoning_count, now.paused_acting_count])),
  },
  {
    chart: new Chart({ title: "Turns finished", unit: "per minute", format: short, series: [{ name: "finished", colour: "reasoning" }] }),
    rows: rates((now, before, s) => [(60 * (now.turns_finished_total - before.turns_finished_total)) / s]),
  },
  {
    chart: new Chart({ title: "Turns ended badly", unit: "per minute", stacked: true, format: short, series: ERRORS.map(([name, colour]) => ({ name, colour })) }),
    rows: rates((now, before, s) => ERRORS.map(([name]) => (60 * Math.max(0, now.ended_badly_total[name] - before.ended_badly_total[name])) / s)),
  },
  {
    chart: new Chart({ title: "Output", unit: "tokens per second", format: short, series: [{ name: "output", colour: "reasoning" }] }),
    rows: rates((now, before, s) => [(now.output_tokens_total - before.output_tokens_total) / s]),
  },
  {
    chart: new Chart({ title: "Prompts", unit: "tokens per second", format: short, series: [{ name: "prompt", colour: "prefill" }] }),
    rows: rates((now, before, s) => [(now.prompt_tokens_total - before.prompt_tokens_total) / s]),
  },
  {
    chart: new Chart({ title: "Hit rate", unit: "of prompt tokens", format: percent, top: 1, none: "No engine tells it", series: [{ name: "cached", colour: "ok" }] }),
    rows: rates((now, before) => {
      const queries = now.cache_query_tokens_total - before.cache_query_tokens_total;
      return [queries ? (now.cache_hit_tokens_total - before.cache_hit_tokens_total) / queries : null];
    }),
  },
  {
    chart: new Chart({ title: "Memory spent on", unit: "tokens", stacked: true, format: short, series: COSTS.map(([name, colour]) => ({ name, colour })) }),
    rows: rates((now, before, s) => COSTS.map(([name]) => Math.max(0, now.costs_token_s[name] - before.costs_token_s[name]) / s)),
  },
  {
    chart: new Chart({ title: "Queued in engines", unit: "tokens", format: short, series: [{ name: "queued", colour: "held" }] }),
    rows: rates((now, before, s) => [Math.max(0, now.costs_token_s.queued - before.costs_token_s.queued) / s]),
  },
  {
    chart: new Chart({ title: "Idle while held", unit: "replicas", format: short, series: [{ name: "idle", colour: "over" }] }),
    rows: rates((now, before, s) => [Math.max(0, now.idle_held_s - before.idle_held_s) / s]),
  },
];

function row({ at_s }, values) {
  return { at_s, values };
}

/** Make rows of what grew in the `SMOOTH_S` before each sample. */
function rates(of) {
  return (all) => {
    const rows = [];
    let first = 0;
    all.forEach((now, index) => {
      while (all[first].at_s < now.at_s - SMOOTH_S) first += 1;
      if (index > first) rows.push(row(now, of(now, all[first], now.at_s - all[first].at_s)));
    });
    return rows;
  };
}

async function ask() {
  const since = samples.at(-1)?.at_s ?? 0;
  const [summary, replicas, queue, history, page] = await Promise.all([
    get("summary"), get("replicas"), get(`queue?limit=${QUEUE_LIMIT}`), get(`history?since=${since}`), get(programs.path),
  ]);
  if (history.started_s !== startedAt) {  // it is another process: nothing of before goes on
    if (startedAt !== null && since) {
      samples = [];
      startedAt = history.started_s;
      return ask();
    }
    startedAt = history.started_s;
  }
  samples.push(...history.samples);
  const oldest = (samples.at(-1)?.at_s ?? 0) - KEPT_S;
  samples = samples.filter((sample) => sample.at_s >= oldest);
  latest = summary.now;
  showSummary(summary);
  showReplicas(replicas);
  showQueue(queue, summary.now, (id, pool) => story.open(id, pool), () => programs.showHeld());
  showErrors(summary.last_errors, (id, pool) => story.open(id, pool));
  programs.show(page);
  showCharts();
  story.sandboxesOn = summary.sandboxes_on;
  await story.refresh();
  return summary;
}

function showSummary({ policy, version, now, rates: last, programs_count: all, replicas_count: known, replicas_up_count: up, cell }) {
  setText(byId("policy"), policy);
  setText(byId("version"), version);
  setText(byId("cell"), place(cell));
  const active = now.active_reasoning_count + now.active_acting_count;
  setText(byId("tile-programs"), whole(all));
  setText(byId("note-programs"), `${whole(active)} active · ${whole(now.paused_reasoning_count)} held · ${whole(now.paused_acting_count)} paused`);
  setText(byId("tile-turns"), whole(now.turns_in_flight_count));
  setText(byId("note-turns"), `${whole(now.turns_held_count)} held`);
  setText(byId("tile-throughput"), short(last.turns_per_min));
  setText(byId("note-throughput"), `over the last ${duration(last.window_s)}`);
  setText(byId("tile-errors"), short(last.errors_per_min));
  byId("tile-errors").classList.toggle("bad", last.errors_per_min > 0);
  setText(byId("note-errors"), `${short(last.abandoned_per_min)} abandoned`);
  setText(byId("tile-first"), duration(now.first_token.p50_s));
  setText(byId("note-first"), percentiles(now.first_token.p90_s, now.first_token.p99_s));
  setText(byId("tile-held"), duration(now.longest_held_s));
  setText(byId("note-held"), last.held_p99_s === null ? "none granted lately" : `granted: p99 ${duration(last.held_p99_s)}`);
  setText(byId("tile-tokens"), short(last.output_tokens_per_s));
  setText(byId("note-tokens"), `${short(last.prompt_tokens_per_s)}/s of prompts`);
  setText(byId("tile-hits"), percent(last.hit_ratio));
  setText(byId("note-hits"), "of prompt tokens");
  for (const { chart, ofGateways } of charts) if (ofGateways && cell?.links_count) chart.none = GATEWAYS_KNOW;
  document.title = `${now.turns_held_count ? `(${now.turns_held_count}) ` : ""}thunderagent`;
  connection(up && up === known ? "live" : "warn", up ? `Live · ${up === known ? count(up, "replica") : `${up} of ${known} replicas`}` : "No replica is up");
}

const percentiles = (p90, p99) => (p99 === null ? "no stream lately" : `p90 ${duration(p90)} · p99 ${duration(p99)}`);

/** Say who leads, who stands by, and how far the log lags: of a scheduler that has gateways. */
function place(cell) {
  if (!cell) return "";
  const parts = [`${cell.role}, epoch ${cell.epoch}`, count(cell.links_count, "gateway")];
  if (cell.has_store) parts.push(cell.has_standby ? "a standby" : "no standby");
  if (cell.log_lag_p99_s !== null) parts.push(`log lag ${(cell.log_lag_p99_s * 1000).toFixed(1)} ms`);
  if (!cell.store_answers) parts.push("the store is away");
  return parts.join(" · ");
}

/** Charts end with what the key figures show: a sample taken while the other answers came is shown with the next. */
function showCharts() {
  const all = latest ? [...samples.filter((sample) => sample.at_s < latest.at_s), latest] : samples;
  const nowS = all.at(-1)?.at_s ?? Date.now() / 1000;
  for (const { chart, rows } of charts) chart.show(rows(all), nowS, windowS);
}

function connection(state, text) {
  const element = byId("connection");
  element.dataset.state = state;
  setText(element, text);
}

function trouble(text) {
  const banner = byId("trouble");
  banner.hidden = !text;
  setText(banner, text);
  document.body.classList.toggle("stale", Boolean(text));
}

/** Ask, show, and come back in a second; later where that failed. */
async function loop() {
  if (asking) {
    askAgain = true;
    return;
  }
  clearTimeout(timer);
  asking = true;
  askAgain = false;
  let pause = PERIOD_MS;
  try {
    const summary = await ask();
    failures = 0;
    byId("simulated").hidden = !summary.engines_are_simulated;
    byId("anonymous").hidden = !summary.rates.mostly_anonymous;
    trouble(summary.closing ? "The proxy is shutting down: turns in flight may end, new ones are refused." : "");
  } catch (error) {
    if (error instanceof Unauthorized) {
      asking = false;
      askForKey();
      return;
    }
    pause = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    failures += 1;
    connection("gone", "Not connected");
    if (error instanceof Gone) trouble(`${error.message}. What you see is as it was; trying again every few seconds.`);
    else if (error instanceof Refused) trouble(`The proxy refused: ${error.message}`);
    else {
      trouble(`This page has a bug: ${error.message}`);
      console.error(error);
    }
  }
  asking = false;
  if (!document.hidden) timer = setTimeout(loop, askAgain ? 0 : pause);
}

function askNow() {
  loop();
}

function askForKey() {
  const dialog = byId("key");
  connection("gone", "Key needed");
  if (!dialog.open) dialog.showModal();
}

byId("key").addEventListener("cancel", (event) => event.preventDefault());
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  setText(byId("key-trouble"), "");
  try {
    await login(byId("key-input").value);
    byId("key-input").value = "";
    byId("key").close();
    loop();
  } catch (error) {
    const said = error instanceof Unauthorized && error.status === 403 ? "This key is not an admin key."
      : error instanceof Unauthorized ? "This key is not right."
      : error instanceof Refused && error.status === 404 ? "This proxy takes no key here. Ask who runs it how to reach its admin API."
        : error.message;
    setText(byId("key-trouble"), said);
  }
});

for (const button of document.querySelectorAll("[data-minutes]")) {
  button.addEventListener("click", () => {
    windowS = 60 * Number(button.dataset.minutes);
    for (const other of document.querySelectorAll("[data-minutes]")) other.setAttribute("aria-pressed", String(other === button));
    showCharts();
  });
}

byId("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("thunderagent-theme", root.dataset.theme);
  } catch {
    // No storage: it holds for this page.
  }
});

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) loop();
});

byId("charts").append(...charts.map(({ chart }) => chart.element));
story.follow();
loop();
