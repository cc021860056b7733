// The table of programs: a page of those that are searched for, in the order of a column.

import { byId, h, keyed, setText } from "./dom.js";
import { because, computedOf, duration, NONE, stateOf, whole } from "./format.js";

const PAGE = 25;
const TYPING_MS = 200;

export class Programs {
  /** `refresh` is called when another page is wanted; `openStory` with the id of a program that was chosen. */
  constructor(refresh, openStory) {
    this.refresh = refresh;
    this.openStory = openStory;
    this.offset = 0;
    this.sort = "opened";
    const again = () => {
      this.offset = 0;
      refresh();
    };
    let typing = 0;
    byId("search").addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(again, TYPING_MS);
    });
    byId("state").addEventListener("change", again);
    for (const button of document.querySelectorAll("[data-sort]")) {
      button.addEventListener("click", () => {
        this.sortBy(button);
        again();
      });
    }
    byId("previous").addEventListener("click", () => {
      this.offset = Math.max(0, this.offset - PAGE);
      refresh();
    });
    byId("next").addEventListener("click", () => {
      this.offset += PAGE;
      refresh();
    });
  }

  /** The address of the page that is wanted. */
  get path() {
    const query = new URLSearchParams(byId("state").value);
    query.set("limit", PAGE);
    query.set("offset", this.offset);
    if (this.sort !== "opened") query.set("sort", this.sort);  // they come in this order anyway
    if (byId("search").value) query.set("search", byId("search").value);
    return `programs?${query}`;
  }

  /** Sort by a column: the largest first, or by name; a second time the other way round. */
  sortBy(button) {
    const name = button.dataset.sort;
    const first = ["id", "state", "replica"].includes(name) || name === "opened" ? name : `-${name}`;
    this.sort = this.sort === first ? (first.startsWith("-") ? name : `-${name}`) : first;
    // The oldest was opened first: ages fall as the times of opening rise.
    const falls = this.sort.startsWith("-") !== (name === "opened");
    this.markSort(button, falls);
  }

  markSort(button, falls) {
    for (const heading of document.querySelectorAll("th[aria-sort]")) heading.setAttribute("aria-sort", "none");
    button.closest("th").setAttribute("aria-sort", falls ? "descending" : "ascending");
  }

  /** List those that are held, the longest first. */
  showHeld() {
    byId("state").value = "status=paused&phase=reasoning";
    byId("search").value = "";
    this.sort = "-held";
    this.markSort(document.querySelector('[data-sort="held"]'), true);
    this.offset = 0;
    this.refresh();
    byId("programs").scrollIntoView();
  }

  show(page) {
    if (page.offset >= page.total && page.total) {  // the page before it is the last by now
      this.offset = Math.floor((page.total - 1) / PAGE) * PAGE;
    }
    keyed(byId("rows"), page.programs, (program) => `${program.program_id} ${program.generation}`, (program) => this.create(program), update);
    const searching = byId("search").value || byId("state").value;
    const empty = byId("no-rows");
    empty.hidden = page.programs.length > 0;
    setText(empty, searching ? "No live program is like that." : "No program is live. Send a turn to /p/any-name/v1/chat/completions, and it appears here.");
    const end = page.offset + page.programs.length;
    setText(byId("page-note"), page.programs.length ? `${whole(page.offset + 1)}–${whole(end)} of ${whole(page.total)}` : "");
    byId("previous").disabled = page.offset === 0;
    byId("next").disabled = page.next_offset === null;
  }

  create(program) {
    const open = () => this.openStory(program.program_id, program.pool);
    const view = {
      state: h("span", { class: "state" }),
      mark: h("span", { class: "marked", text: "marked", title: "it pauses at the end of its turn" }),
      replica: h("td", { class: "mono" }),
      pool: h("td", { class: "pool mono" }),
      claim: h("td", { class: "number" }),
      computed: h("td", { class: "number" }),
      turns: h("td", { class: "number" }),
      age: h("td", { class: "number" }),
      held: h("td", { class: "number" }),
    };
    const row = h("tr", { onclick: open },
      h("td", {}, h("button", { type: "button", class: "mono id", text: program.program_id, title: program.program_id })),
      h("td", {}, view.state, view.mark), view.replica, view.pool, view.claim, view.computed, view.turns, view.age, view.held);
    row.view = view;
    return row;
  }
}

function update({ view }, program) {
  const state = stateOf(program);
  setText(view.state, state);
  view.state.dataset.state = state;
  view.state.title = program.hold_reason ? because(program.hold_reason) : "";
  view.mark.hidden = !program.marked;
  setText(view.replica, program.replica_id ?? NONE);
  setText(view.pool, program.pool);
  setText(view.claim, whole(program.claim_tokens));
  setText(view.computed, whole(computedOf(program)));
  setText(view.turns, whole(program.turn_count));
  setText(view.age, duration(program.age_s));
  setText(view.held, duration(program.held_s_total + (program.held_for_s ?? 0)));
}
