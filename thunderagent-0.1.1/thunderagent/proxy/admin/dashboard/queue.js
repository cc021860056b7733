// The queue: whose turns are held, for how long, and why; in the order in which they would go on. What must happen for
// the first of them to go on is the answer to most questions.

import { byId, h, keyed, setText } from "./dom.js";
import { because, count, duration, short, whole } from "./format.js";

export const QUEUE_LIMIT = 6;

/** `now` has the counts that the key figures show: what was asked a moment later would say others. `openStory` shows one
 * of them; `showAll` lists all. */
export function showQueue(queue, now, openStory, showAll) {
  const parts = [`${count(now.turns_held_count, "turn")} held`, `${whole(now.paused_acting_count)} paused`];
  setText(byId("queue-note"), now.turns_held_count || now.paused_acting_count ? parts.join(" · ") : "");
  const [first] = queue.waiting;
  const needs = byId("first-needs");
  needs.hidden = !queue.first_needs;
  setText(needs, queue.first_needs ? `For ${first ? first.program_id : "the first"} to go on: ${queue.first_needs}.` : "");
  const rest = now.paused_reasoning_count - queue.waiting.length;
  const more = byId("queue-more");
  more.hidden = rest <= 0;
  more.onclick = showAll;
  setText(more, `Show all ${count(now.paused_reasoning_count, "program")}`);
  const empty = byId("queue-empty");
  empty.hidden = queue.waiting_count > 0;
  setText(empty, emptyOf(queue));
  keyed(byId("queue"), queue.waiting, (program) => `${program.program_id} ${program.generation}`, (program) => create(program, openStory), update);
}

function emptyOf(queue) {
  if (queue.held_in_place_count) return `${count(queue.held_in_place_count, "turn")} held where their programs are active.`;
  return queue.anonymous_held_count ? "Only turns without a program are held, for a replica." : "No turn is held.";
}

function create(program, openStory) {
  const view = { held: h("span", { class: "for" }), why: h("span", { class: "why" }), claim: h("span", { class: "claim" }) };
  const button = h("button", { type: "button", class: "row", onclick: () => openStory(program.program_id, program.pool) },
    h("span", { class: "mono id", text: program.program_id, title: program.program_id }), view.held, view.why, view.claim);
  const element = h("li", {}, button);
  element.view = view;
  return element;
}

function update({ view }, program) {
  setText(view.held, `held ${duration(program.held_for_s)}`);
  const why = because(program.hold_reason);
  setText(view.why, program.pool ? `${program.pool}: ${why}` : why);
  setText(view.claim, `claims ${short(program.claim_tokens)} tokens`);
}
