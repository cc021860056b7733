// The last turns whose clients got an error: which, where, and why.

import { byId, h, keyed, setText } from "./dom.js";
import { count, duration, NONE } from "./format.js";

const SHOWN_COUNT = 6;

export function showErrors(errors, openStory) {
  byId("errors-card").hidden = !errors.length;
  setText(byId("errors-note"), errors.length ? `the last ${count(Math.min(errors.length, SHOWN_COUNT), "turn")} that ended badly` : "");
  // They have no id: a row is known by what it says, and by its place among the same.
  const seen = new Map();
  const keyOf = (error) => {
    const said = [error.program_id, error.replica_id, error.what, error.cause].join("\u0000");
    seen.set(said, (seen.get(said) ?? 0) + 1);
    return `${said}\u0000${seen.get(said)}`;
  };
  keyed(byId("errors"), errors.slice(0, SHOWN_COUNT), keyOf, (error) => create(error, openStory), update);
}

function create({ program_id: id, replica_id: replica, what, cause }, openStory) {
  const ago = h("td");
  const program = id === null ? h("td", { text: "no program" })
    : h("td", {}, h("button", { type: "button", class: "mono id", text: id, title: id, onclick: () => openStory(id, "") }));
  const row = h("tr", {}, ago, program, h("td", { class: "mono", text: replica ?? NONE }),
    h("td", { text: what.replaceAll("_", " ") }), h("td", { class: "mono" }, ...breakable(cause)));
  row.view = { ago };
  return row;
}

/** A word of our own, which a narrow page may break after its underscores. */
function breakable(text) {
  return text.split("_").flatMap((part, index) => (index ? ["_", h("wbr"), part] : [part]));
}

function update({ view }, error) {
  setText(view.ago, duration(error.ago_s));
}
