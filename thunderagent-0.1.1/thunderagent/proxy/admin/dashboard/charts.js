// Line and stacked-area charts in SVG. The legend tells the figures: of the last sample, or of the one pointed at.

import { h, s, setText } from "./dom.js";
import { NONE } from "./format.js";

const HEIGHT = 148;
const LEFT = 48;
const RIGHT = 4;
const TOP = 8;
const BOTTOM = 20;
const POINTS = 240;

const TIMES_S = [60, 120, 240, 360, 600, 1200, 1800, 3600, 7200, 14400, 28800];
const DAY_S = 86400;

/** Return a round number at or above `value`, for the top of an axis. It and its half are multiples of `least`, the smallest
 * difference that is written there: what stands at a line of the grid is where the line is. */
export function niceTop(value, least = 0.1) {
  if (!(value > 0)) return 1;
  let size = 10 ** Math.floor(Math.log10(value));
  for (;; size *= 10) {
    const found = [1, 1.5, 2, 3, 4, 5, 6, 8].find((step) => step * size >= value * 0.999 && isWhole((step * size) / 2 / least));
    if (found) return found * size;
  }
}

const isWhole = (number) => number > 0.5 && Math.abs(number - Math.round(number)) < 1e-6;

/** The same of a time in seconds: it is written in milliseconds up to a second, and half of it is round, too. */
export function niceTopS(value) {
  return value > 40 ? TIMES_S.find((time) => time >= value * 0.999) ?? DAY_S * Math.ceil(value / DAY_S) : niceTop(value, value > 2 ? 0.1 : 0.001);
}

/**
 * One chart. `series` is [{name, colour}], colour being a class of the style sheet; `stacked` draws areas on top of each
 * other; `format` writes a value; `top` fixes the axis, or else `nice` rounds it up; `none` says why there is no value.
 */
export class Chart {
  constructor({ title, unit, series, format, stacked = false, top = null, nice = niceTop, none = "None lately" }) {
    Object.assign(this, { series, format, stacked, top, nice, none });
    this.rows = [];
    this.pointed = null;
    this.pointerX = null;
    this.values = series.map(() => h("b", { text: NONE }));
    const legend = series.map(({ name, colour }, index) => h("li", { class: colour }, `${name} `, this.values[index]));
    this.when = h("span", { class: "when" });
    this.grid = s("g", { class: "grid" });
    this.paths = series.map(({ colour }) => s("path", { class: `${stacked ? "area" : "line"} ${colour}` }));
    this.cross = s("line", { class: "cross", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.svg = s("svg", { role: "img", tabindex: 0, height: HEIGHT, "aria-label": title }, this.grid, ...this.paths, this.cross);
    this.note = h("p", { class: "over-chart", text: "Nothing yet" });
    this.element = h("section", { class: "card chart" },
      h("div", { class: "head" }, h("h2", { text: title }), h("p", { class: "aside" }, this.when, ` ${unit}`)),
      h("ul", { class: "key" }, ...legend),
      h("div", { class: "plot" }, this.svg, this.note));
    this.title = title;
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  /** Show `rows`, [{at_s, values}], of the `window_s` up to `now_s`. A value that is null is a gap. */
  show(rows, now_s, window_s) {
    this.rows = thin(rows.filter((row) => row.at_s > now_s - window_s - 2));
    this.now_s = now_s;
    this.window_s = window_s;
    this.draw();
  }

  x(at_s) {
    return LEFT + (this.width - LEFT - RIGHT) * (1 - (this.now_s - at_s) / this.window_s);
  }

  y(value) {
    return TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / this.axisTop);
  }

  draw() {
    this.width = this.svg.clientWidth;
    if (!this.width || this.now_s === undefined) return;
    const heights = this.rows.map(({ values }) => (this.stacked ? [values.reduce((sum, value) => sum + (value ?? 0), 0)] : values.map((value) => value ?? 0)));
    this.axisTop = this.top ?? this.nice(Math.max(...heights.flat(), 0));
    this.drawGrid();
    const drawn = this.rows.filter((row) => this.x(row.at_s) >= LEFT - 1);
    const point = ({ at_s }, value) => (value === null || value === undefined ? null : `${this.x(at_s).toFixed(1)},${this.y(Math.min(value, this.axisTop)).toFixed(1)}`);
    const at = (heightOf) => drawn.map((row, place) => point(row, heightOf(row, place)));
    let floor = drawn.map(() => 0);
    this.paths.forEach((path, index) => {
      if (!this.stacked) return path.setAttribute("d", linePath(at(({ values }) => values[index])));
      const below = floor;  // each area stands on the one before, and covers nothing of it
      floor = drawn.map(({ values }, place) => below[place] + (values[index] ?? 0));
      path.setAttribute("d", areaPath(at((_, place) => floor[place]), at((_, place) => below[place])));
    });
    this.note.hidden = drawn.filter(({ values }) => values.some((value) => value !== null)).length > 1;
    setText(this.note, drawn.length > 1 ? this.none : "Nothing yet");
    if (this.pointerX === null) this.tell();
    else this.point(this.pointerX);
  }

  drawGrid() {
    const lines = [0, 0.5, 1].flatMap((part) => {
      const y = this.y(part * this.axisTop);
      return [
        s("line", { x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }),
        s("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end", text: this.format(part * this.axisTop) }),
      ];
    });
    const minutes = this.window_s / 60;
    const times = [5, 4, 3, 2, 1, 0].map((part) => s("text", {
      x: this.x(this.now_s - 60 * (part * minutes) / 5),
      y: HEIGHT - 5,
      "text-anchor": part === 5 ? "start" : part ? "middle" : "end",
      text: part ? `−${(part * minutes) / 5}${part === 5 ? " min" : ""}` : "now",
    }));
    this.grid.replaceChildren(...lines, ...times);
  }

  /** Point at the sample nearest to a place, or at none: then the legend tells the last. */
  point(x) {
    this.pointerX = x;
    this.pointed = x === null || !this.rows.length ? null
      : this.rows.reduce((best, row) => (Math.abs(this.x(row.at_s) - x) < Math.abs(this.x(best.at_s) - x) ? row : best)).at_s;
    this.tell();
  }

  step(event) {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape" && this.pointed !== null) this.point(null);
    else if (way && this.rows.length) {
      const at = this.rows.findIndex((row) => row.at_s === this.pointed);
      const next = at < 0 ? this.rows.length - 1 : Math.min(this.rows.length - 1, Math.max(0, at + way));
      this.pointed = this.rows[next].at_s;
      this.tell();
    } else return;
    event.preventDefault();
  }

  tell() {
    if (!this.width || this.now_s === undefined) return;
    const row = this.rows.find(({ at_s }) => at_s === this.pointed) ?? this.rows.at(-1);
    const pointing = row !== undefined && row.at_s === this.pointed;
    const texts = this.series.map((_, index) => (row?.values[index] === null || row === undefined ? NONE : this.format(row.values[index])));
    texts.forEach((text, index) => setText(this.values[index], text));
    setText(this.when, pointing ? new Date(1000 * row.at_s).toLocaleTimeString("en-GB") : "");
    this.cross.setAttribute("visibility", pointing ? "visible" : "hidden");
    if (pointing) for (const name of ["x1", "x2"]) this.cross.setAttribute(name, this.x(row.at_s).toFixed(1));
    const said = this.series.map(({ name }, index) => `${name} ${texts[index]}`).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}: ${said}`);
  }
}

/** Keep few enough rows to draw, always the same ones: those whose second is a multiple of the step. */
function thin(rows) {
  const step = Math.ceil(rows.length / POINTS);
  return step < 2 ? rows : rows.filter((row, index) => Math.floor(row.at_s) % step === 0 || index === rows.length - 1);
}

function linePath(points) {
  let pen = "M";
  return points.map((point) => {
    if (point === null) {
      pen = "M";
      return "";
    }
    const part = pen + point;
    pen = "L";
    return part;
  }).join("");
}

function areaPath(above, below) {
  return above.length < 2 ? "" : `M${above.join("L")}L${[...below].reverse().join("L")}Z`;
}
