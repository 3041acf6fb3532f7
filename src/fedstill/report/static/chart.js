// Charts as inline SVG, drawn from plain data: curves by round, clients from the worst served to the best, the data
// partition, confusion matrices. The report carries this file inside it; the board imports it.
// What comes from a run is only ever set as text or as a number: nothing of it is parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];
const COLOURS = 8;

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
export const html = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const svg = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);

const colour = (i) => `var(--c${i % COLOURS})`;
// Lines differ in their dashes too, so that they can be told apart without colour.
const dashes = (i) => DASHES[(i + Math.floor(i / COLOURS)) % DASHES.length];

export function number(value, share = false) {
  if (value === null || value === undefined) return "–";
  if (share) return `${(100 * value).toFixed(1)} %`;
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= unit) return `${+(value / (letter === "k" ? 1e3 : unit)).toPrecision(3)} ${letter}`;
  }
  return String(+value.toPrecision(size < 1 ? 3 : 4));
}

function ticks(low, high, count) {
  const rough = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}

function logTicks(low, high) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    for (const digit of Math.log10(high / low) > 2 ? [1] : [1, 2, 5]) found.push(digit * 10 ** power);
  }
  return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

/** An exponential moving average without the bias of its start; gaps stay gaps. */
export function smoothed(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** Lines over a common axis with the values under the pointer, or under a cursor that the arrow keys move. */
class Plot {
  constructor(host, title) {
    this.title = title;
    this.box = html("div", { class: "plot" });
    this.tip = html("div", { class: "tip", role: "status" });
    host.append(this.box);
    this.width = 0;
    new ResizeObserver(() => {
      if (this.options && Math.abs(this.box.clientWidth - this.width) > 1) this.draw(this.options);
    }).observe(this.box);
  }

  // options: {series: [{name, index, x, y, low, high, raw, level}], xLabel, yLabel, share, log}
  draw(options) {
    this.options = options;
    const width = (this.width = this.box.clientWidth || 720);
    const height = Math.max(240, Math.min(420, width * 0.45));
    const [left, right, top, bottom] = [58, 12, 24, 40];
    const usable = (value) => value !== null && value !== undefined && (!options.log || value > 0);
    const values = options.series.flatMap((s) => [...s.y, ...(s.low || []), ...(s.high || []), ...(s.raw || []), s.level]);
    const known = values.filter(usable);
    const xs = [...new Set(options.series.flatMap((s) => s.x))].sort((a, b) => a - b);
    this.xs = xs;
    this.root = svg("svg", {
      viewBox: `0 0 ${width} ${height}`, width, height, tabindex: "0", role: "img",
      "aria-label": `${this.title}: ${options.yLabel} by ${options.xLabel}; ${options.series.map((s) => s.name).join("; ")}. ` +
        "The arrow keys read values.",
    });
    this.box.replaceChildren(this.root, this.tip);
    this.tip.replaceChildren();
    if (!known.length) {
      this.root.append(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle", class: "faint" }, "no number yet"));
      return;
    }
    let [low, high] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
    if (!options.log && low >= 0 && (options.share || low < 0.4 * high)) low = 0;
    if (low === high) [low, high] = options.log ? [low / 2, high * 2] : [low - 0.5 * Math.abs(low || 1), high + 0.5 * Math.abs(high || 1)];
    const start = xs.length > 1 ? xs[0] : xs[0] - 1, end = xs.length > 1 ? xs[xs.length - 1] : xs[0] + 1;
    this.px = (x) => left + ((x - start) / (end - start)) * (width - left - right);
    const at = options.log ? Math.log10 : (v) => v;
    this.py = (y) => height - bottom - ((at(y) - at(low)) / (at(high) - at(low))) * (height - top - bottom);
    this.bounds = { left, right: width - right, top, bottom: height - bottom };

    for (const tick of options.log ? logTicks(low, high) : ticks(low, high, height / 55)) {
      this.root.append(
        svg("line", { class: "axis", x1: left, x2: width - right, y1: this.py(tick), y2: this.py(tick) }),
        svg("text", { class: "faint", x: left - 6, y: this.py(tick) + 4, "text-anchor": "end" },
          options.share ? `${+(100 * tick).toPrecision(3)} %` : number(tick)),
      );
    }
    for (const tick of ticks(start, end, width / 90).filter(Number.isInteger)) {
      this.root.append(svg("text", { class: "faint", x: this.px(tick), y: height - bottom + 16, "text-anchor": "middle" }, String(tick)));
    }
    this.root.append(
      svg("text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, options.xLabel),
      svg("text", { x: 4, y: 14 }, options.yLabel),
    );

    const path = (x, y) => {
      let pen = "M";
      return x.map((value, i) => {
        if (!usable(y[i])) { pen = "M"; return ""; }
        const step = `${pen}${this.px(value).toFixed(1)} ${this.py(y[i]).toFixed(1)}`;
        pen = "L";
        return step;
      }).join("");
    };
    for (const s of options.series) {
      const look = { stroke: colour(s.index), "stroke-dasharray": dashes(s.index) };
      if (s.low) {
        const [bandLow, bandHigh] = [s.low.map((v) => (usable(v) ? v : low)), s.high.map((v) => (usable(v) ? v : low))];
        const back = path([...s.x].reverse(), [...bandLow].reverse()).replace("M", "L");
        this.root.append(svg("path", { class: "band", fill: colour(s.index), d: `${path(s.x, bandHigh)}${back}Z` }));
      }
      if (usable(s.level)) {
        this.root.append(svg("line", { stroke: colour(s.index), "stroke-dasharray": "1 4", x1: left, x2: width - right,
          y1: this.py(s.level), y2: this.py(s.level) }));
      }
      if (s.raw) this.root.append(svg("path", { class: "curve raw", ...look, "stroke-dasharray": "", d: path(s.x, s.raw) }));
      this.root.append(svg("path", { class: "curve", ...look, d: path(s.x, s.y), "data-points": s.x.length }));
      if (s.x.length === 1 && usable(s.y[0])) {
        this.root.append(svg("circle", { fill: colour(s.index), r: 4, cx: this.px(s.x[0]), cy: this.py(s.y[0]) }));
      }
    }
    this.marks = svg("g");
    this.root.append(this.marks);
    this.root.addEventListener("pointermove", (event) => {
      const box = this.root.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * width;
      this.show(xs.reduce((best, each, i) => (Math.abs(this.px(each) - x) < Math.abs(this.px(xs[best]) - x) ? i : best), 0));
    });
    this.root.addEventListener("pointerleave", () => this.hide());
    this.root.addEventListener("blur", () => this.hide());
    this.root.addEventListener("keydown", (event) => {
      const place = this.place ?? -1;
      const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: xs.length - 1 }[event.key];
      if (event.key === "Escape") this.hide();
      if (to === undefined) return;
      event.preventDefault();
      this.show(Math.max(0, Math.min(xs.length - 1, to)));
    });
    // What the reader was looking at stays there when a curve grows.
    if (this.place !== undefined && this.place < xs.length) this.show(this.place);
  }

  show(place) {
    this.place = place;
    const x = this.xs[place], at = this.px(x), { left, right, top, bottom } = this.bounds;
    this.marks.replaceChildren(svg("line", { class: "cursor", x1: at, x2: at, y1: top, y2: bottom }));
    const rows = [html("div", {}, html("strong", {}, `${this.options.xLabel} ${x}`))];
    for (const s of this.options.series) {
      const i = s.x.indexOf(x), y = i < 0 ? null : s.y[i];
      if (y === null || (this.options.log && y <= 0)) continue;
      this.marks.append(svg("circle", { r: 4, cx: at, cy: this.py(y), fill: colour(s.index) }));
      const band = s.low ? ` (${number(s.low[i], this.options.share)} to ${number(s.high[i], this.options.share)})` : "";
      rows.push(html("div", {}, html("span", {}, s.name), html("span", {}, number(y, this.options.share) + band)));
    }
    this.tip.replaceChildren(...rows);
    const half = at > (left + right) / 2;
    this.tip.style.left = half ? "" : `${at + 12}px`;
    this.tip.style.right = half ? `${this.width - at + 12}px` : "";
  }

  hide() {
    this.place = undefined;
    this.marks?.replaceChildren();
    this.tip.replaceChildren();
  }
}

/** Buttons that show and hide the lines; what is hidden is remembered by name. */
class Legend {
  constructor(host, changed) {
    this.hidden = new Set();
    this.list = html("ul", { class: "legend", "aria-label": "lines shown" });
    this.changed = changed;
    host.append(this.list);
  }

  draw(names) {
    if (this.names && names.length === this.names.length && names.every((name, i) => name === this.names[i])) return;
    this.names = names;
    this.list.replaceChildren(...names.map((name, i) => {
      const line = svg("svg", { width: 28, height: 10, "aria-hidden": "true" }, svg("line", {
        x1: 0, x2: 28, y1: 5, y2: 5, stroke: colour(i), "stroke-width": 2.5, "stroke-dasharray": dashes(i) }));
      const button = html("button", { type: "button", "aria-pressed": String(!this.hidden.has(name)) }, line, name);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(name)) this.hidden.add(name);
        button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
        this.changed();
      });
      return html("li", {}, button);
    }));
  }
}

/** Any metric by round; `update` shows other data and keeps what the reader chose. */
export class Curves {
  constructor(host, data) {
    this.metric = html("select");
    this.smoothing = html("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: 0 });
    this.log = html("input", { type: "checkbox" });
    const controls = html("div", { class: "controls" },
      html("label", {}, "metric", this.metric),
      html("label", {}, "smoothing", this.smoothing),
      html("label", {}, this.log, "logarithmic"));
    for (const control of [this.metric, this.smoothing, this.log]) control.addEventListener("input", () => this.draw());
    host.append(controls);
    this.plot = new Plot(host, "curves");
    this.legend = new Legend(host, () => this.draw());
    this.update(data);
  }

  update(data) {
    this.data = data;
    const chosen = this.metric.value, names = data.metrics.map((metric) => metric.name);
    if (names.join("\n") !== [...this.metric.options].map((option) => option.value).join("\n")) {
      this.metric.replaceChildren(...data.metrics.map((metric) => html("option", { value: metric.name }, metric.label)));
      if (names.includes(chosen)) this.metric.value = chosen;
    }
    this.legend.draw(data.groups.map((group) => group.name));
    this.draw();
  }

  draw() {
    const metric = this.data.metrics.find((each) => each.name === this.metric.value) || { name: "", label: "", share: false };
    const weight = Number(this.smoothing.value);
    const series = this.data.groups.flatMap((group, index) => {
      const line = group.lines[metric.name];
      if (!line || this.legend.hidden.has(group.name)) return [];
      const smooth = (values) => (values && weight ? smoothed(values, weight) : values);
      return [{ name: group.name, index, x: line.x, y: smooth(line.y), low: smooth(line.low), high: smooth(line.high),
        raw: weight ? line.y : undefined }];
    });
    this.plot.draw({ series, xLabel: "round", yLabel: metric.label, share: metric.share, log: this.log.checked });
  }
}

/** The accuracy of each client, from the worst served to the best, one line a group of runs. */
export class Clients {
  constructor(host, data) {
    this.plot = new Plot(host, "clients");
    this.legend = new Legend(host, () => this.draw());
    this.update(data);
  }

  update(data) {
    this.data = data;
    this.legend.draw(data.groups.map((group) => group.name));
    this.draw();
  }

  draw() {
    const series = this.data.groups.map((group, index) => ({ ...group, index })).filter((s) => !this.legend.hidden.has(s.name));
    this.plot.draw({ series, xLabel: "client, by rank", yLabel: "accuracy on the client's own test", share: true, log: false });
  }
}

const shortened = (name, most) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);
const widest = (names, most) => 7 * Math.max(1, ...names.map((name) => Math.min(most, name.length)));

/** Training samples by client and class: the area of a bubble is their number. */
export class Bubbles {
  constructor(host, data) {
    const { clients, classes, counts } = data;
    const box = html("div", { class: "drawing wide", tabindex: "0", role: "region", "aria-label": "data partition" });
    host.append(box);
    const named = clients.some((name) => name.length > 3);
    const step = Math.max(14, Math.min(36, 900 / Math.max(clients.length, classes.length)));
    const left = widest(classes, 24) + 12, below = named ? widest(clients, 20) + 30 : 40;
    const width = left + step * clients.length + 12, height = step * classes.length + below + 8;
    const most = Math.max(1, ...counts.map((row) => Math.max(...row)));
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
      "aria-label": `bubbles of ${clients.length} clients by ${classes.length} classes; the largest is of ${most} samples` });
    classes.forEach((name, c) => {
      const y = step * (c + 0.5);
      root.append(svg("line", { class: "axis", x1: left, x2: width - 12, y1: y, y2: y }),
        svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, shortened(name, 24)));
    });
    const every = named ? 1 : Math.ceil(24 / step);
    clients.forEach((name, k) => {
      const x = left + step * (k + 0.5), y = step * classes.length + 16;
      root.append(svg("line", { class: "axis", x1: x, x2: x, y1: 0, y2: step * classes.length }));
      if (k % every === 0) {
        root.append(named
          ? svg("text", { x: 0, y: 0, "text-anchor": "end", transform: `translate(${x + 4} ${y - 6}) rotate(-90)` }, shortened(name, 20))
          : svg("text", { x, y, "text-anchor": "middle" }, name));
      }
    });
    counts.forEach((row, k) => row.forEach((count, c) => {
      if (!count) return;
      root.append(svg("circle", { class: "bubble", cx: left + step * (k + 0.5), cy: step * (c + 0.5),
        r: Math.max(1, 0.5 * step * Math.sqrt(count / most)) },
      svg("title", {}, `client ${clients[k]}, ${classes[c]}: ${count} samples`)));
    }));
    root.append(svg("text", { x: left + (step * clients.length) / 2, y: height - 4, "text-anchor": "middle" }, "client"));
    box.append(root);
    const rest = data.all > clients.length ? `; the first ${clients.length} of ${data.all} clients` : "";
    host.append(html("p", { class: "note" }, `The largest bubble is ${most} samples${rest}.`));
  }
}

/** Matrices of true by predicted classes, in per cent of each true class. */
export class Confusion {
  constructor(host, data) {
    const { classes, matrices } = data;
    const few = classes.length <= 20, step = few ? 26 : Math.max(3, 400 / classes.length);
    const left = few ? widest(classes, 16) + 14 : 8, below = few ? widest(classes, 16) + 14 : 8;
    const box = html("div", { class: "matrices drawing" });
    host.append(box);
    for (const { name, rows } of matrices) { // pale cells, so that numbers on them can be read
      const [width, height] = [left + step * classes.length + 4, 44 + step * classes.length + below];
      const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `confusion matrix, ${name}` },
        svg("text", { x: 4, y: 14 }, name),
        svg("text", { x: 4, y: 34, class: "faint" }, "rows: true class, columns: predicted"));
      rows.forEach((row, i) => row.forEach((share, j) => {
        if (!share) return;
        const [x, y] = [left + step * j, 44 + step * i];
        root.append(svg("rect", { class: "cell", x, y, width: step, height: step, opacity: 0.0045 * share },
          svg("title", {}, `${classes[i]} taken for ${classes[j]}: ${share} %`)));
        if (few) {
          root.append(svg("text", { x: x + step / 2, y: y + step / 2 + 4, "text-anchor": "middle", "pointer-events": "none" }, String(share)));
        }
      }));
      root.append(svg("rect", { class: "axis", x: left, y: 44, width: step * classes.length, height: step * classes.length }));
      for (const [i, text] of few ? classes.entries() : []) {
        const place = step * (i + 0.5);
        root.append(svg("text", { x: left - 6, y: 48 + place, "text-anchor": "end" }, shortened(text, 16)),
          svg("text", { "text-anchor": "end", transform: `translate(${left + place + 4} ${50 + step * classes.length}) rotate(-90)` },
            shortened(text, 16)));
      }
      box.append(root);
    }
  }
}

const KINDS = { curves: Curves, clients: Clients, bubbles: Bubbles, confusion: Confusion };
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  new KINDS[figure.dataset.chart](figure, JSON.parse(figure.querySelector("script").textContent));
}
