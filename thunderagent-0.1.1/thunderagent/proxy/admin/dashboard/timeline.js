// One program's story as a picture: when it was held, ran, and was at a tool; where; and what was decided.

import { h, s } from "./dom.js";
import { because, duration, whole } from "./format.js";

const LANE = 26;
const ABOVE = 23;
const AXIS = 22;
const GUTTER = 8;
const NARROW = 480;
const ENDS = new Set(["finished", "failed", "refused", "abandoned", "rejected"]);
const DECISIONS = new Set(["restore", "pause", "mark", "unmark"]);

/** What of a story has a beginning and an end, and what happened at one time; in seconds before now. */
export function spansOf(program) {
  const holds = [];
  const turns = [];
  const claims = [];
  const marks = [];
  let held = null;
  let claim = null;
  const first = program.story[0]?.ago_s ?? program.age_s;
  const begins = Math.max(first, ...program.story.map((each) => each.began_ago_s ?? 0), ...program.turns.map((each) => each.arrived_ago_s));
  for (const entry of program.story) {
    const { what, why, ago_s: at, replica_id: replica } = entry;
    if (what === "hold") held ??= { from: at, why };
    else if (what === "restore") {
      if (held) holds.push({ ...held, to: at });
      held = null;
      claim = { from: at, replica };
    } else if (what === "pause") {
      claims.push({ from: claim?.from ?? begins, to: at, replica });
      claim = null;
    } else if (ENDS.has(what)) {
      if (entry.began_ago_s !== null) turns.push({ from: entry.began_ago_s, to: at, replica, outcome: what, why });
      else if (held) {
        holds.push({ ...held, to: at, outcome: what });
        held = null;
      }
    }
    if (DECISIONS.has(what)) marks.push({ at, what, why, replica, tokens: entry.claim_tokens });
    else if (!ENDS.has(what) && what !== "hold") marks.push({ at, what, why, replica: null, tokens: entry.claim_tokens });
  }
  for (const turn of program.turns) {
    if (turn.granted_ago_s === null) continue;
    turns.push({ from: turn.granted_ago_s, to: 0, replica: turn.replica_id, outcome: "", why: "", first: turn.started_ago_s });
  }
  if (held && program.waiting) holds.push({ ...held, to: 0, outcome: "" });
  if (program.status === "active") claims.push({ from: claim?.from ?? begins, to: 0, replica: program.replica_id });
  return { begins, holds, turns, claims, marks, tools: toolsOf(program, holds, turns) };
}

/** The gaps between what the program did with us: there its tools ran, or its client tried again after a failure. */
function toolsOf(program, holds, turns) {
  const busy = [...holds, ...turns].sort((a, b) => b.from - a.from);
  const tools = [];
  let end = null;
  let name = "";
  let away = false;
  const push = (to) => {
    if (end !== null && end - to > 0.001) tools.push({ from: end, to, name, away });
  };
  for (const span of busy) {
    if (end === null || span.from < end) push(span.from);
    if (end === null || span.to <= end) {
      end = span.to;
      name = span.why?.startsWith("calls ") ? span.why.slice(6) : "";
      away = span.outcome !== "finished";
    }
  }
  if (program.phase === "acting" && end !== null) {
    name = program.holding?.tool || name;
    push(0);
  }
  return tools;
}

export class Timeline {
  constructor() {
    this.svg = s("svg", { class: "timeline", role: "group", "aria-label": "Timeline" });
    this.caption = h("p", { class: "caption" });
    this.element = h("figure", {}, this.svg, this.caption);
    this.idle = "Point at something to read what it was. Arrow keys go from one to the next.";
    this.caption.textContent = this.idle;
    this.chosen = null;
    new ResizeObserver(() => this.draw()).observe(this.element);
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.step(event));
  }

  show(program) {
    this.program = program;
    this.draw();
  }

  draw() {
    const width = this.element.clientWidth;
    if (!this.program || !width) return;
    const { begins, holds, turns, claims, marks, tools } = spansOf(this.program);
    const range = Math.max(5, begins * 1.01);
    const x = (ago) => GUTTER + (width - 2 * GUTTER) * (1 - Math.min(ago, range) / range);
    const replicas = [...new Set([...claims, ...turns].map((each) => each.replica).filter((id) => id !== null))];
    const sandboxes = marks.filter((mark) => mark.what.startsWith("sandbox"));
    const lanes = ["held", ...replicas.map((id) => `on ${id}`), "tools", ...(sandboxes.length ? ["sandboxes"] : [])];
    const laneY = (name) => lanes.indexOf(name) * (LANE + ABOVE) + ABOVE;
    const height = lanes.length * (LANE + ABOVE) + AXIS;
    const focused = this.svg.contains(document.activeElement);
    this.items = [];
    const block = (kind, span, lane, inset, label) => {
      const left = x(span.from);
      const shape = s("rect", { class: `span ${kind}`, x: left, y: laneY(lane) + inset, width: Math.max(2, x(span.to) - left), height: LANE - 2 * inset, rx: 3 });
      this.add(shape, `${kind} ${label}`, span, label);
      return shape;
    };
    const content = [
      ...lanes.map((name) => s("text", { class: "lane", x: GUTTER, y: laneY(name) - 8, text: name })),
      ...lanes.map((name) => s("line", { class: "floor", x1: GUTTER, x2: width - GUTTER, y1: laneY(name) + LANE, y2: laneY(name) + LANE })),
      ...claims.map((span) => block("claim", span, `on ${span.replica}`, 0, `has its claim on ${span.replica}`)),
      ...holds.map((span) => block("hold", span, "held", 4, `held, ${span.why.replaceAll("_", " ")}: ${because(span.why)}`)),
      ...turns.map((span) => block(`turn ${span.outcome}`, span, `on ${span.replica}`, 6, `turn on ${span.replica}${span.outcome ? `, ${span.outcome}` : ", in flight"}${span.why ? `, ${span.why}` : ""}`)),
      ...tools.map((span) => block(span.away ? "away" : "tool", span, "tools", 6, span.away ? "away after a turn that did not finish" : `tool ${span.name || "runs"}`)),
      ...marks.map((mark) => this.mark(mark, x, laneY)),
      ...axis(range, x, height, width),
    ];
    this.svg.setAttribute("height", height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...content);
    this.items.sort((a, b) => b.from - a.from);
    this.chosen = this.sameAs(this.chosen);
    this.rove();
    if (focused) this.items.find((item) => item.shape.getAttribute("tabindex") === "0")?.shape.focus();
    this.tell();
  }

  mark(mark, x, laneY) {
    const lane = mark.what.startsWith("sandbox") ? "sandboxes" : mark.replica === null ? "held" : `on ${mark.replica}`;
    const at = x(mark.at);
    const y = laneY(lane);
    const kind = mark.what.replaceAll(" ", "-");
    const shape = s("g", { class: `event ${kind}` },
      s("line", { x1: at, x2: at, y1: y, y2: y + LANE }),
      s("circle", { cx: at, cy: y, r: 4 }));
    const why = mark.why ? `, ${mark.why.replaceAll("_", " ")}: ${because(mark.why)}` : "";
    const reason = because(mark.why) === mark.why && mark.why ? `: ${mark.why}` : why;
    this.add(shape, `${mark.what} ${mark.why}`, { from: mark.at, to: mark.at }, `${mark.what}${mark.replica ? ` on ${mark.replica}` : ""}${reason} (claim ${whole(mark.tokens)} tokens)`);
    return shape;
  }

  add(shape, kind, { from, to }, label) {
    const length = from === to ? "" : ` · ${duration(from - to)}${to === 0 ? " so far" : ""}`;
    const ended = from === to ? from : to;
    const item = { kind, from, at_s: Date.now() / 1000 - from, shape, text: `${label}${length}${ended ? ` · ${duration(ended)} ago` : ""}` };
    shape.setAttribute("aria-label", item.text);
    shape.setAttribute("role", "img");
    shape.append(s("title", { text: item.text }));
    shape.addEventListener("pointerenter", () => this.choose(item));
    shape.addEventListener("focus", () => this.choose(item));
    this.items.push(item);
  }

  choose(item) {
    this.chosen = item;
    this.rove();
    this.tell();
  }

  /** What was chosen in the picture before, in this one: of its kind, what began nearest to its time. */
  sameAs(before) {
    if (before === null) return null;
    const far = (item) => Math.abs(item.at_s - before.at_s);
    const [nearest] = this.items.filter((item) => item.kind === before.kind).sort((a, b) => far(a) - far(b));
    return nearest && far(nearest) < 1 ? nearest : null;
  }

  /** One of all things is reached by Tab: the chosen one, or the last. */
  rove() {
    const current = this.chosen ?? this.items.at(-1);
    for (const item of this.items) {
      item.shape.setAttribute("tabindex", item === current ? "0" : "-1");
      item.shape.classList.toggle("chosen", item === this.chosen);
    }
  }

  tell() {
    this.caption.textContent = this.chosen?.text ?? this.idle;
  }

  step(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!way || !this.items.length) return;
    const at = this.items.findIndex((item) => item.shape === document.activeElement);
    this.items[Math.min(this.items.length - 1, Math.max(0, at + way))].shape.focus();
    event.preventDefault();
  }
}

function axis(range, x, height, width) {
  return (width < NARROW ? [1, 0.5, 0] : [1, 0.75, 0.5, 0.25, 0]).map((part) => s("text", {
    class: "tick",
    x: x(part * range),
    y: height - 6,
    "text-anchor": part === 1 ? "start" : part ? "middle" : "end",
    text: part ? `−${duration(part * range)}` : "now",
  }));
}
