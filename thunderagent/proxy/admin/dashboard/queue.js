// The queue: who waits, for how long, and why; in the order in which they would be restored.

import { byId, h, keyed, setText } from "./dom.js";
import { because, count, duration, short } from "./format.js";

export const QUEUE_LIMIT = 50;

export function showQueue(queue, openStory) {
  const parts = [];
  if (queue.turns_held_count) parts.push(`${count(queue.turns_held_count, "turn")} held`);
  if (queue.paused_acting_count) parts.push(`${queue.paused_acting_count} paused at a tool`);
  setText(byId("queue-note"), parts.join(" · "));
  const list = byId("queue");
  if (!queue.waiting_count) {
    const text = queue.anonymous_held_count ? "Only turns without a program wait, for a replica." : "No turn waits.";
    if (list.firstElementChild?.className !== "empty" || list.textContent !== text) list.replaceChildren(h("p", { class: "empty", text }));
    return;
  }
  if (list.firstElementChild?.tagName !== "OL") list.replaceChildren(h("ol"), h("p", { class: "more" }));
  const [rows, more] = list.children;
  keyed(rows, queue.waiting, (program) => `${program.program_id} ${program.generation}`, (program) => create(program, openStory), update);
  const rest = queue.waiting_count - queue.waiting.length;
  setText(more, rest > 0 ? `and ${count(rest, "more", "more")}` : "");
}

function create(program, openStory) {
  const view = { waits: h("span", { class: "waits" }), why: h("span", { class: "why" }), claim: h("span", { class: "claim" }) };
  const button = h("button", { type: "button", class: "row", onclick: () => openStory(program.program_id, program.pool) },
    h("span", { class: "mono id", text: program.program_id }), view.waits, view.why, view.claim);
  const element = h("li", {}, button);
  element.view = { ...view, button };
  return element;
}

function update({ view }, program) {
  setText(view.waits, duration(program.held_for_s));
  const why = program.hold_reason.replaceAll("_", " ");
  setText(view.why, program.pool ? `${why} · ${program.pool}` : why);
  setText(view.claim, `${short(program.claim_tokens)} tokens`);
  view.button.title = `held: ${because(program.hold_reason)}`;
}
