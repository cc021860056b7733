// One program, in a drawer: where it stands, what must happen for it to go on, and how it came there.

import { get, pathOf, Refused } from "./api.js";
import { byId, h, keyed, setText } from "./dom.js";
import { because, computedOf, duration, NONE, percent, stateOf, whole } from "./format.js";
import { Timeline } from "./timeline.js";

const EVENTS_MS = 150;

export class Story {
  constructor() {
    this.drawer = byId("story");
    this.timeline = new Timeline();
    this.state = h("span", { class: "state" });
    this.sentence = h("p", { class: "sentence" });
    this.facts = h("dl", { class: "grid" });
    this.rooms = h("div", { class: "rooms" });
    this.sandboxes = h("ul", { class: "sandboxes" });
    this.happenings = h("tbody");
    this.legend = h("ul", { class: "key" },
      h("li", { class: "held", text: "held" }), h("li", { class: "reasoning", text: "turn" }),
      h("li", { class: "claimed", text: "claim on memory" }), h("li", { class: "tool", text: "tool" }));
    byId("story-body").append(
      h("div", { class: "now" }, this.state, this.sentence),
      this.facts, this.legend, this.timeline.element, this.rooms, this.sandboxes,
      h("details", { open: true }, h("summary", { text: "All that happened" }),
        h("div", { class: "wide" }, h("table", {},
          h("thead", {}, h("tr", {}, ...["Ago", "What", "Why", "Replica", "Claim"].map((text, at) => h("th", { text, class: at === 4 ? "number" : "" })))),
          this.happenings))));
    byId("story-close").addEventListener("click", () => this.drawer.close());
    this.drawer.addEventListener("close", () => this.closed());
    this.drawer.addEventListener("click", (event) => {
      if (event.target === this.drawer) this.drawer.close();  // the backdrop
    });
    window.addEventListener("hashchange", () => this.follow());
    this.id = null;
    this.pool = "";
    this.sandboxesOn = false;
  }

  /** Show the program that the address names, or none. */
  follow() {
    const said = new URLSearchParams(location.hash.slice(1));
    const [id, pool] = [said.get("program"), said.get("pool") ?? ""];
    if (id === null || id === "") this.drawer.close();
    else if (id !== this.id || pool !== this.pool) this.show(id, pool);
  }

  /** `pool` says which of several it is shown in; empty where there is one. */
  open(id, pool) {
    location.hash = new URLSearchParams(pool ? { program: id, pool } : { program: id }).toString();
  }

  show(id, pool) {
    this.stopListening();
    this.id = id;
    this.pool = pool;
    this.ended = false;
    setText(byId("story-title"), pool ? `${id} in ${pool}` : id);
    this.drawer.dataset.has = "nothing";
    if (!this.drawer.open) this.drawer.showModal();
    byId("story-body").scrollTop = 0;
    this.refresh();
    this.listen();
  }

  closed() {
    this.id = null;
    this.stopListening();
    history.replaceState(null, "", location.pathname + location.search);
  }

  /** Ask at once when something happens to it; the page asks every second besides. */
  listen() {
    const events = this.events = new EventSource(`events?program_id=${encodeURIComponent(this.id)}`);
    const soon = () => {
      clearTimeout(this.soon);
      this.soon = setTimeout(() => this.refresh(), EVENTS_MS);
    };
    for (const kind of ["hold", "restore", "pause", "mark", "unmark", "grant", "turn_finished", "turn_failed", "turn_abandoned", "sandbox_ready", "sandbox_failed", "lost"]) {
      events.addEventListener(kind, soon);
    }
    events.addEventListener("release", (event) => {
      clearTimeout(this.soon);
      this.end(because(JSON.parse(event.data).reason));
    });
  }

  stopListening() {
    clearTimeout(this.soon);
    this.events?.close();
    this.events = null;
  }

  async refresh() {
    const { id, pool } = this;
    if (id === null || this.ended) return;
    try {
      const program = await get(pool ? `${pathOf(id)}?${new URLSearchParams({ pool })}` : pathOf(id));
      if (id === this.id && pool === this.pool && !this.ended) this.update(program);
    } catch (error) {
      if (!(error instanceof Refused)) return;  // the page says what is wrong with the proxy
      if (id === this.id) this.end(error.status === 404 ? "" : error.message);
    }
  }

  /** It is over: what was seen last stays. Without a reason, no live program has its id. */
  end(why) {
    this.ended = true;
    this.stopListening();
    const wasSeen = this.drawer.dataset.has === "story";
    if (!wasSeen) this.drawer.dataset.has = "words";
    setText(this.state, why || wasSeen ? "ended" : "not live");
    this.state.dataset.state = "paused";
    const seen = wasSeen ? "What was seen last stays here." : "It ended, or its id is another.";
    setText(this.sentence, why ? `This program is not live: ${why}.` : `No live program has this id. ${seen}`);
  }

  update(program) {
    this.drawer.dataset.has = "story";
    const state = stateOf(program);
    setText(this.state, program.marked ? `${state}, marked` : state);
    this.state.dataset.state = state;
    setText(this.sentence, sentenceOf(program));
    keyed(this.facts, factsOf(program), ([name]) => name,
      ([name]) => h("div", {}, h("dt", { text: name }), h("dd")),
      (element, [, text]) => setText(element.lastElementChild, text));
    this.timeline.show(program);
    this.showRooms(program.waiting);
    this.happenings.replaceChildren(...[...program.story].reverse().map((entry) => h("tr", {},
      h("td", { class: "nowrap", text: duration(entry.ago_s) }), h("td", { text: entry.what }),
      h("td", { text: entry.why.replaceAll("_", " "), title: because(entry.why) }),
      h("td", { class: "mono", text: entry.replica_id ?? NONE }), h("td", { class: "number", text: whole(entry.claim_tokens) }))));
    this.showSandboxes(program.program_id);
  }

  showRooms(waiting) {
    if (!waiting?.replicas.length) {
      this.rooms.replaceChildren();
      return;
    }
    const rows = waiting.replicas.map((room) => h("tr", {},
      h("td", { class: "mono", text: room.is_home ? `${room.replica_id} (home)` : room.replica_id }),
      ...[room.free_tokens, room.needed_tokens, room.kept_tokens, room.missing_tokens, room.resident_tokens].map((tokens) => h("td", { class: "number", text: whole(tokens) }))));
    this.rooms.replaceChildren(h("h3", { text: "Where it could go, in tokens" }), h("div", { class: "wide" }, h("table", {},
      h("thead", {}, h("tr", {}, ...["Replica", "Free", "Needed", "Kept for growth", "Missing", "Its history there"].map((text, at) => h("th", { text, class: at ? "number" : "" })))),
      h("tbody", {}, ...rows))));
  }

  async showSandboxes(id) {
    if (!this.sandboxesOn) return;
    try {
      const { sandboxes } = await get(`${pathOf(id)}/sandboxes`);
      if (id !== this.id) return;
      this.sandboxes.replaceChildren(...sandboxes.map((sandbox) => h("li", {},
        h("span", { class: "mono", text: sandbox.sandbox_id }),
        ` ${sandbox.stage} · ${sandbox.template ?? sandbox.driver}${sandbox.prepare_s === null ? "" : ` · made in ${duration(sandbox.prepare_s)}`}${sandbox.why ? ` · ${sandbox.why}` : ""}`)));
    } catch (error) {
      if (error instanceof Refused) this.sandboxes.replaceChildren();
    }
  }
}

/** Say what it does, or what must happen for it to go on. */
function sentenceOf(program) {
  return [doingOf(program), hintOf(program)].filter(Boolean).join(" ");
}

/** Say when its client expects the next turn. */
function hintOf({ hinted }) {
  if (!hinted || hinted.next_turn_in_s === null) return hinted ? `Its client says: ${hinted.keep}.` : "";
  const { next_turn_in_s: seconds, counts, believed_ratio: believed } = hinted;
  const when = seconds < 0 ? `${duration(-seconds)} ago` : `in ${duration(seconds)}${counts ? "" : " after this one"}`;
  return `Its client expects the next turn ${when} (believed ${percent(believed)}).`;
}

function doingOf(program) {
  const { waiting, holding } = program;
  if (waiting) return `Held for ${duration(waiting.for_s)}: ${because(waiting.reason)}. To go on: ${waiting.what_must_happen}.`;
  if (holding) {
    const until = holding.hold_until_in_s;
    const kept = until === null ? "as long as there is room" : until < 0 ? "until others need the room" : `for up to ${duration(until)} more`;
    return `Its tool ${holding.tool ? `${holding.tool} ` : ""}has run for ${duration(holding.for_s)}; it keeps its memory on ${program.replica_id} ${kept}.`;
  }
  if (program.status === "paused") return `Its tool has run for ${duration(program.acting_for_s)}, without a claim on memory. Its next turn is placed when it comes.`;
  return `${program.turns_in_flight_count === 1 ? "A turn is" : `${program.turns_in_flight_count} turns are`} in flight on ${program.replica_id}.`;
}

function factsOf(program) {
  const hits = program.prompt_tokens_total ? percent(program.cached_tokens_total / program.prompt_tokens_total) : NONE;
  return [
    ["Claim", `${whole(program.claim_tokens)} tokens`],
    ["Context", `${whole(program.context_tokens)} tokens`],
    ["Turns", whole(program.turn_count)],
    ["Computed", `${whole(computedOf(program))} tokens`],
    ["Output", `${whole(program.output_tokens_total)} tokens`],
    ["Prompt cached", hits],
    ["Held in all", duration(program.held_s_total + (program.held_for_s ?? 0))],
    ["Age", duration(program.age_s)],
    ["Branches", whole(program.branches_count)],
    ...toldOf(program).filter(([, text]) => text),
  ];
}

/** What clients, operators and judges said of it; most programs have nothing of the kind. */
function toldOf(program) {
  const priorities = [program.priority || "", ...Object.entries(program.priority_by_replica).map(([id, priority]) => `${priority} on ${id}`)];
  return [
    ["Tenant", program.tenant],
    ["Class", program.program_class],
    ["Group", program.group_id],
    ["Parent", program.parent_id],
    ["Routed to", program.routed_to],
    ["Priority", priorities.filter(Boolean).join(", ")],
    ["Expected success", program.judged?.level],
  ];
}
