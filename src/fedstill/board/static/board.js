// The board: the list of runs, and those that are chosen side by side. It asks the server again every two seconds.
// As in chart.js, what comes from a run is only ever set as text.

import { Bubbles, Clients, Curves, html, number } from "./chart.js";

const EVERY = 2000; // milliseconds
const CLIENTS = 50; // of a run, the worst served, that are listed

const find = (id) => document.getElementById(id);
const chosen = new Set(new URLSearchParams(location.hash.slice(1)).getAll("run"));
let runs = [];
let curves, clients;
let asked = false; // whether runs were chosen, by the reader or by the address

async function get(path, names = []) {
  const query = new URLSearchParams(names.map((name) => ["run", name]));
  const answer = await fetch(`api/${path}?${query}`);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

function complain(error) {
  find("counts").textContent = `no answer from the board: ${error.message}`;
}

// --- the list ---

function visible(run) {
  const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = [run.name, run.method, run.data, run.state].join(" ").toLowerCase();
  return (!find("state").value || run.state === find("state").value) && words.every((word) => text.includes(word));
}

function line(run) {
  const box = html("input", { type: "checkbox" });
  box.checked = chosen.has(run.name);
  box.addEventListener("change", () => choose(run.name, box.checked));
  const cell = (text, attributes = {}) => html("td", { role: "cell", ...attributes }, text);
  const row = html("tr", { role: "row", class: box.checked ? "chosen" : "" },
    html("th", { scope: "row", role: "rowheader" }, html("label", {}, box, run.name)),
    cell(run.state, { class: run.state, title: run.problem }));
  if (run.state === "unreadable") {
    row.append(cell(run.problem, { colspan: 6 }));
    return row;
  }
  row.append(cell(`${run.round} of ${run.rounds ?? "?"}`), cell(number(run.accuracy, true)), cell(number(run.fm)),
    cell(number(run.wlp, true)), cell((run.bytes / 1e6).toFixed(1)), cell(run.seconds.toFixed(1)));
  return row;
}

function list() {
  const rank = { running: 0, interrupted: 1, finished: 2, unreadable: 3 };
  const shown = runs.filter(visible).sort((a, b) => rank[a.state] - rank[b.state]); // stable: else as the server has it
  const body = find("runs").tBodies[0];
  const made = shown.map(line);
  // The list is made again: who was at a box of it stays there.
  const focus = body.contains(document.activeElement) ? [...body.querySelectorAll("input")].indexOf(document.activeElement) : -1;
  body.replaceChildren(...made);
  if (focus >= 0) body.querySelectorAll("input")[focus]?.focus();
  const running = runs.filter((run) => run.state === "running").length;
  find("counts").textContent = `${runs.length} runs, ${running} running${shown.length < runs.length ? `, ${shown.length} shown` : ""}`;
}

function choose(name, on) {
  asked = true;
  if (on) chosen.add(name); else chosen.delete(name);
  history.replaceState(null, "", `#${new URLSearchParams([...chosen].map((each) => ["run", each]))}`);
  list();
  compare().catch(complain);
}

// --- what is chosen ---

function table(grid) {
  // A number may be broken into lines before its deviation, interval or count.
  const pieces = (text) => (/^[+-]?\d/.test(text)
    ? text.split(/ (?=[±[(])/).flatMap((piece) => [html("span", {}, piece), " "]) : [text]);
  const cell = (each, i) => html("td", { role: "cell", "data-label": grid.columns[i + 1] || "" },
    ...(each.best ? [html("strong", {}, ...pieces(each.text))] : pieces(each.text)));
  return html("div", { class: "wide", tabindex: "0", role: "region", "aria-label": grid.title },
    html("table", { class: "numbers cards", role: "table" },
      html("caption", {}, grid.caption),
      html("thead", { role: "rowgroup" }, html("tr", { role: "row" },
        ...grid.columns.map((name) => html("th", { scope: "col", role: "columnheader" }, name)))),
      html("tbody", { role: "rowgroup" }, ...grid.rows.map(([first, ...others]) => html("tr", { role: "row" },
        html("th", { scope: "row", role: "rowheader" }, first.text), ...others.map(cell))))));
}

let newest = 0; // an answer that comes after that to a later question is old
let shown = ""; // the lines of the runs that are shown: if they are the same, so is all the rest
async function compare() {
  const rows = [...chosen].flatMap((name) => runs.find((run) => run.name === name) || []);
  const names = rows.map((run) => run.name), now = JSON.stringify(rows);
  find("chosen").hidden = !names.length;
  if (!names.length || now === shown) return;
  const question = ++newest;
  const found = await get("compare", names);
  if (question !== newest) return;
  shown = now;
  if (curves) curves.update(found.curves); else curves = new Curves(find("curves"), found.curves);
  find("served").hidden = !found.clients;
  if (found.clients) {
    if (clients) clients.update(found.clients); else clients = new Clients(find("clients"), found.clients);
  }
  const text = JSON.stringify(found.tables); // tables that are the same stay: somebody may be selecting text
  if (find("tables").dataset.shown !== text) {
    find("tables").dataset.shown = text;
    find("tables").replaceChildren(...found.tables.flatMap((grid) => [html("h2", {}, grid.title), table(grid)]));
  }
  const before = [...find("details").children];
  const boxes = names.map((name) => before.find((box) => box.dataset.run === name) || details(name));
  if (boxes.length !== before.length || boxes.some((box, i) => box !== before[i])) find("details").replaceChildren(...boxes);
  for (const box of boxes) if (box.open) await refresh(box);
}

// --- one run ---

function details(name) {
  const box = html("details", { "data-run": name }, html("summary", {}, name));
  const log = html("pre", { class: "log", tabindex: "0", "aria-label": `log of ${name}` });
  const partition = html("div");
  const button = html("button", { type: "button" }, "show the data partition");
  button.addEventListener("click", async () => {
    button.disabled = true;
    const found = await get("partition", [name]);
    partition.replaceChildren();
    if (found.problem) partition.append(html("p", { class: "note" }, `Not shown: ${found.problem}`));
    else new Bubbles(partition, found.partition);
    button.remove();
  });
  box.append(html("p", { class: "cost" }), html("div", { class: "clients" }), button, partition, html("h3", {}, "Log"), log,
    html("details", {}, html("summary", {}, "Settings"), html("pre", { class: "config" })));
  box.addEventListener("toggle", () => box.open && refresh(box).catch(complain));
  return box;
}

async function refresh(box) {
  const run = await get("run", [box.dataset.run]);
  const part = (css) => box.querySelector(`.${css}`);
  part("cost").textContent = run.problem ? run.problem
    : `${run.state}, round ${run.round} of ${run.rounds ?? "?"}: ${(run.bytes / 1e6).toFixed(1)} MB moved, ${run.seconds.toFixed(1)} seconds`;
  const log = part("log"), following = log.scrollTop + log.clientHeight >= log.scrollHeight - 20;
  if (log.textContent !== run.log) {
    log.textContent = run.log;
    if (following) log.scrollTop = log.scrollHeight;
  }
  part("config").textContent = run.config;
  const shown = run.clients.slice(0, CLIENTS);
  part("clients").replaceChildren(shown.length
    ? html("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "clients" }, html("table", { class: "numbers", role: "table" },
      html("caption", {}, `accuracy of the final model on each client's own test samples, the worst served first` +
        (shown.length < run.clients.length ? `; ${shown.length} of ${run.clients.length}` : "")),
      html("thead", {}, html("tr", {}, ...["client", "test samples", "accuracy", ""].map((name) => html("th", { scope: "col" }, name)))),
      html("tbody", {}, ...shown.map((client) => html("tr", {}, html("th", { scope: "row" }, client.name),
        html("td", {}, String(client.samples)), html("td", {}, number(client.accuracy, true)),
        html("td", { "aria-hidden": "true" }, html("meter", { min: 0, max: 1, value: client.accuracy })))))))
    : html("p", { class: "note" }, "The accuracy of each client is known when the run has ended; WLP and FM are among the curves."));
}

// --- all of it, again and again ---

async function poll() {
  try {
    const found = await get("runs");
    runs = found.runs;
    find("root").textContent = found.root;
    if (!asked && !chosen.size && runs.length) {
      const first = runs.find((run) => run.state === "running") || runs.findLast((run) => run.state !== "unreadable");
      if (first) chosen.add(first.name);
    }
    list();
    await compare();
    for (const box of find("details").children) {
      if (box.open && runs.some((run) => run.name === box.dataset.run && run.state === "running")) await refresh(box);
    }
  } catch (error) {
    complain(error);
  }
}

for (const id of ["filter", "state"]) find(id).addEventListener("input", list);
find("none").addEventListener("click", () => {
  asked = true;
  chosen.clear();
  history.replaceState(null, "", "#");
  list();
  compare().catch(complain);
});
async function forever() {
  if (!document.hidden) await poll();
  setTimeout(forever, EVERY);
}
forever();
