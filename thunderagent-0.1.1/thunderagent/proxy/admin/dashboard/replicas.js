// The replicas: a bar for each, of what is claimed of its memory, by whom, and what is free.

import { byId, h, keyed, setText } from "./dom.js";
import { count, duration, percent, short, whole } from "./format.js";

const PARTS = ["reasoning", "acting", "other"];
const SHOWN_COUNT = 16;

let all = false;
byId("replicas-more").addEventListener("click", () => {
  all = true;
  byId("replicas-more").hidden = true;
});

/** Show each, those whose verdict is not `up` first; of many only so many until all are asked for. */
export function showReplicas({ replicas }) {
  const list = byId("replicas");
  setText(byId("replicas-note"), verdictsOf(replicas));
  document.body.classList.toggle("pools", replicas.some((replica) => replica.pool));
  if (!replicas.length) {
    list.replaceChildren(h("p", { class: "empty", text: "No replica is configured. Start the proxy with --backends URL,URL." }));
    return;
  }
  const inOrder = [...replicas.filter(isTrouble), ...replicas.filter((replica) => !isTrouble(replica))];
  byId("replicas-more").hidden = all || replicas.length <= SHOWN_COUNT;
  setText(byId("replicas-more"), `Show all ${count(replicas.length, "replica")}`);
  const shown = all ? inOrder : inOrder.slice(0, SHOWN_COUNT);
  list.classList.toggle("by-two", shown.length % 2 === 0 && shown.length % 3 !== 0);
  keyed(list, shown, (replica) => replica.replica_id, create, update);
}

const isTrouble = (replica) => replica.verdict !== "up";

/** Return how many there are of each verdict. */
function verdictsOf(replicas) {
  const counts = new Map();
  for (const { verdict } of replicas) counts.set(verdict, (counts.get(verdict) ?? 0) + 1);
  return [...counts].map(([verdict, number]) => `${whole(number)} ${verdict}`).join(" · ");
}

function create(replica) {
  const parts = Object.fromEntries([...PARTS, "over", "shared"].map((name) => [name, h("span", { class: `part ${name}` })]));
  const limit = h("span", { class: "limit", title: "what may be claimed" });
  const cells = {
    health: h("span", { class: "pill" }),
    pool: h("span", { class: "mono pool", title: "its pool" }),
    demand: h("span", { class: "demand" }),
    programs: h("li"),
    engine: h("li"),
    hits: h("li"),
    free: h("li"),
    idle: h("li", { class: "bad", title: "it had no turn in flight while a program was held for memory that could run there" }),
    why: h("p", { class: "bad" }),
  };
  const bar = h("div", { class: "bar", role: "img" }, ...PARTS.map((name) => parts[name]), parts.over, parts.shared, limit);
  const element = h("article", { class: "replica", "aria-label": replica.replica_id },
    h("div", { class: "line" }, h("h3", { class: "mono", text: replica.replica_id, title: replica.url }), cells.pool, cells.health, cells.demand),
    bar,
    h("ul", { class: "facts" }, cells.programs, cells.free, cells.engine, cells.hits, cells.idle),
    cells.why);
  element.view = { ...cells, parts, bar, limit };
  return element;
}

function update(element, replica) {
  const view = element.view;
  setText(view.health, isTrouble(replica) ? `${replica.verdict} for ${duration(replica.verdict_for_s)}` : replica.verdict);
  view.health.dataset.state = replica.verdict === "up" ? "up" : replica.up ? "draining" : "down";
  setText(view.pool, replica.pool);
  const suspended = replica.suspended_for.length ? `nothing is granted: ${replica.suspended_for.join(", ")}` : "";
  setText(view.why, replica.verdict === "suspended" ? suspended : replica.verdict_reason);
  const size = replica.capacity_tokens;
  const limit = replica.limit_tokens;
  const full = limit ? ` · ${percent(replica.demand_tokens / limit)}` : "";
  setText(view.demand, `${whole(replica.demand_tokens)}${limit === null ? "" : ` of ${whole(limit)}`} tokens${full}`);
  const shared = replica.shared_tokens ? ` · ${short(replica.shared_tokens)} shared` : "";
  const free = limit === null ? null : limit - replica.demand_tokens;
  const room = isTrouble(replica) ? "gets nothing new" : free === null ? "capacity unknown" : `${short(free)} free`;
  setText(view.free, (free < 0 ? `${short(-free)} over the limit` : room) + shared);
  setText(view.programs, `${whole(replica.reasoning_count)} reasoning · ${whole(replica.acting_count)} acting`);
  const { running_count: running, waiting_count: waiting } = replica.engine;
  setText(view.engine, running === null || !replica.up ? count(replica.turns_in_flight_count, "turn") : `engine: ${whole(running)} running · ${whole(waiting ?? 0)} queued`);
  setText(view.hits, `${percent(replica.hit_ratio)} hits`);
  setText(view.idle, replica.idle_held_s >= 1 ? `idle while held: ${duration(replica.idle_held_s)}` : "");
  view.idle.hidden = replica.idle_held_s < 1;
  drawBar(view, replica, size, limit);
}

/** Draw the claims to scale. What several programs share is in the demand once, and pale behind it where it was saved. */
function drawBar({ parts, bar, limit: tick }, replica, size, limit) {
  const claims = { reasoning: replica.reasoning_tokens, acting: replica.acting_tokens, other: replica.other_tokens };
  const sum = PARTS.reduce((total, name) => total + claims[name], 0);
  const demand = replica.demand_tokens;
  const scale = Math.max(size ?? 0, limit ?? 0, demand, 1);
  const width = (tokens) => `${(100 * Math.max(0, tokens)) / scale}%`;
  for (const name of PARTS) parts[name].style.width = width(sum ? (claims[name] * demand) / sum : 0);
  const over = limit === null ? 0 : Math.max(0, demand - limit);
  parts.over.style.width = width(over);
  parts.over.style.left = width(demand - over);
  parts.shared.style.width = width(Math.min(replica.shared_tokens, scale - demand));
  parts.shared.style.left = width(demand);
  tick.style.left = width(limit ?? 0);
  tick.hidden = limit === null || limit >= scale;
  const said = PARTS.map((name) => `${whole(claims[name])} ${name === "other" ? "without a program" : name}`).join(", ");
  bar.setAttribute("aria-label", `Tokens claimed: ${said}, ${whole(replica.shared_tokens)} of them shared`);
  bar.title = `${said}, ${whole(replica.shared_tokens)} of them claimed more than once and counted once`;
}
