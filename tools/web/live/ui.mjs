// What every interactive part is made of: elements, controls with labels, a status line, formats.
// Values come from Python; here they are only written for a reader and turned into lengths of a drawing.

const NS = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function" && name.startsWith("on")) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// el("p", { class: "x", "data-value": 3, onclick: f }, "text", other): attributes, and handlers as functions.
export const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const svg = (tag, attributes, ...children) => fill(document.createElementNS(NS, tag), attributes, children);

// --- controls: each returns its row; row.control is the input, row.set(value) moves it without an event -----

// id: one of its kind on the page, e.g. "memory-bill-batch". Either min, max and step, or `values`, a rising list
// whose members the slider walks through. text(value): what is shown and read out beside it.
export function range({ id, label, min = 0, max, step = 1, values, value, text = String, onInput }) {
  const at = (v) => (values ? Math.max(0, values.findLastIndex((x) => x <= v)) : v);
  const now = () => (values ? values[+input.value] : +input.value);
  const input = el("input", values
    ? { id, type: "range", min: 0, max: values.length - 1, step: 1 }
    : { id, type: "range", min, max, step });
  const shown = el("output", { for: id });
  const tell = () => {
    shown.textContent = text(now());
    shown.dataset.value = now();
    input.setAttribute("aria-valuetext", text(now()));
  };
  input.oninput = () => {
    tell();
    onInput?.(now());
  };
  const row = el("div", { class: "live-row" }, el("label", { for: id }, label), input, shown);
  row.control = input;
  row.set = (v) => {
    input.value = at(v);
    tell();
  };
  row.set(value);
  return row;
}

// options: texts, or { value, label }.
export function choose({ id, label, options, value, onChange }) {
  const made = options.map((o) => (typeof o === "object" ? o : { value: o, label: o }));
  const select = el("select", { id }, made.map((o) => el("option", { value: o.value }, o.label)));
  select.onchange = () => onChange?.(select.value);
  const row = el("div", { class: "live-row" }, el("label", { for: id }, label), select);
  row.control = select;
  row.set = (v) => {
    select.value = v;
  };
  row.set(value);
  return row;
}

// A short text; `empty`: what stands there while nothing is written.
export function write({ id, label, empty, value, onChange }) {
  const input = el("input", { id, type: "text", placeholder: empty, maxlength: LONGEST, autocomplete: "off", spellcheck: "false" });
  input.onchange = () => onChange?.(input.value.trim());
  const row = el("div", { class: "live-row" }, el("label", { for: id }, label), input);
  row.control = input;
  row.set = (v) => {
    input.value = v;
  };
  row.set(value);
  return row;
}
const LONGEST = 40; // characters of a written text

// The form that companion.live.cost describes: `first` are the rows that it begins with, `more` what is folded away.
// `now` is the setting, "" where nothing is asked; asked() is what goes to Python, told() what the address says.
export function form(part, { first, more }, state, changed) {
  const fields = [...first, ...Object.values(more).flat()];
  const said = new Set([...first.map((field) => field.name), ...Object.keys(state)]);
  const allowed = ({ name, levels, options, value }) => {
    if (levels) return member(levels, state[name], value);
    return options ? among(options, state[name], value) : (state[name] ?? value).slice(0, LONGEST);
  };
  const now = Object.fromEntries(fields.map((field) => [field.name, allowed(field)]));
  const set = (name) => (value) => {
    now[name] = value;
    said.add(name);
    changed();
  };
  const control = ({ name, levels, unit, help, ...field }) => {
    const given = { ...field, id: `${part}-${name}`, value: now[name] };
    const text = unit === "TOKENS" ? format.tokens : format.number;
    const row = levels ? range({ ...given, values: levels, text, onInput: set(name) })
      : (field.options ? choose : write)({ ...given, onChange: set(name) });
    row.append(el("small", { id: `${given.id}-help`, class: "live-help" }, help));
    row.control.setAttribute("aria-describedby", `${given.id}-help`);
    row.title = help;
    return row;
  };
  const group = ([name, rows]) => el("fieldset", {}, el("legend", {}, name), el("div", { class: "live-controls" }, rows.map(control)));
  const open = Object.values(more).flat().some((field) => now[field.name] !== "");
  const chosen = (has) => Object.fromEntries(Object.entries(now).filter(has));
  return {
    now,
    first: el("div", { class: "live-controls" }, first.map(control)),
    more: el("details", { class: "live-more", open }, el("summary", { id: `${part}-more` }, "More assumptions"), Object.entries(more).map(group)),
    levels: (name) => fields.find((field) => field.name === name).levels,
    asked: () => chosen(([, value]) => value !== ""),
    told: () => chosen(([name]) => said.has(name)),
  };
}

export const button = (label, onclick, props) => el("button", { type: "button", class: "live-button", onclick, ...props }, label);

// A status line that screen readers read out when it changes: say(host)("text").
export function say(host) {
  const line = el("p", { class: "live-say", role: "status" });
  host.append(line);
  return (text, wrong = false) => {
    line.classList.toggle("live-wrong", wrong);
    if (line.textContent !== text) line.textContent = text;
  };
}

// A list of results: facts(host)([{ key, label, text, value }]); `value` is kept with all digits.
export function facts(host) {
  const list = el("dl", { class: "live-facts" });
  host.append(list);
  return (rows) => list.replaceChildren(...rows.map(({ key, label, text, value }) =>
    el("div", {}, el("dt", {}, label), el("dd", { "data-key": key, "data-value": exact(value) }, text))));
}

// The names of the colours: legend([["weights", "weights"], ["cache", "cache of the batch"]]).
export const legend = (kinds) => el("ul", { class: "live-legend" },
  kinds.map(([kind, label]) => el("li", {}, el("span", { class: `live-swatch live-${kind}` }), label)));

// A drawing that fits its place: draw(width in pixels) gives an <svg>. Returns a function that draws again.
export function drawing(host, draw) {
  const plot = el("div", { class: "live-plot" });
  host.append(plot);
  let width = 0;
  const again = () => width && plot.replaceChildren(draw(width));
  new ResizeObserver(([entry]) => {
    if (Math.abs(entry.contentRect.width - width) < 1) return;
    width = entry.contentRect.width;
    again();
  }).observe(plot);
  return again;
}

// A chart with two logarithmic axes. x, y: { from, to, ticks, label, text(value) }. The result's `node` is the <svg>;
// line(points, kind, dashed), dot([x, y], kind, shape, label) and rule(x, text) draw into it, in the axes' units.
export function chart({ width, height = 260, x, y, label }) {
  const left = 58, right = 14, top = 24, bottom = 46;
  const log = Math.log10;
  const px = (v) => left + ((log(v) - log(x.from)) / (log(x.to) - log(x.from))) * (width - left - right);
  const py = (v) => height - bottom - ((log(v) - log(y.from)) / (log(y.to) - log(y.from))) * (height - top - bottom);
  const node = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  const inside = (axis) => axis.ticks.filter((t) => t >= axis.from && t <= axis.to);
  const apart = (list, at, least) => list.reduce((kept, t) => (kept.length && Math.abs(at(t) - at(kept.at(-1))) < least ? kept : [...kept, t]), []);
  const write = (text, at) => svg("text", at, text);
  for (const t of apart(inside(x), px, 44)) {
    node.append(svg("path", { class: "live-grid", d: `M${px(t)},${top}V${height - bottom}` }), write(x.text(t), { x: px(t), y: height - bottom + 17, "text-anchor": "middle" }));
  }
  for (const t of apart(inside(y), py, 20)) {
    node.append(svg("path", { class: "live-grid", d: `M${left},${py(t)}H${width - right}` }), write(y.text(t), { x: left - 6, y: py(t) + 4, "text-anchor": "end" }));
  }
  node.append(
    svg("path", { class: "live-axis", d: `M${left},${top}V${height - bottom}H${width - right}` }),
    write(x.label, { x: (left + width - right) / 2, y: height - 8, "text-anchor": "middle" }),
    write(y.label, { x: 2, y: 12 }),
  );
  const line = (points, kind, dashed) => node.append(svg("polyline", {
    class: `live-line live-${kind}`, points: points.map(([a, b]) => `${px(a)},${py(b)}`).join(" "), "stroke-dasharray": dashed ? "6 4" : null,
  }));
  const dot = ([a, b], kind, shape, text) => {
    const [cx, cy] = [px(a), py(b)], side = cx > width / 2 ? -1 : 1;
    node.append(shape === "square"
      ? svg("rect", { class: `live-dot live-${kind}`, x: cx - 6, y: cy - 6, width: 12, height: 12 })
      : svg("circle", { class: `live-dot live-${kind}`, cx, cy, r: 6.5 }));
    if (text) node.append(write(text, { x: cx + 11 * side, y: cy + (side < 0 ? -10 : 5), "text-anchor": side < 0 ? "end" : "start" }));
  };
  const rule = (at, text) => node.append(
    svg("path", { class: "live-axis", "stroke-dasharray": "2 3", d: `M${px(at)},${top}V${height - bottom}` }),
    write(text, { x: px(at), y: top - 8, "text-anchor": px(at) > width * 0.75 ? "end" : "middle" }),
  );
  return { node, line, dot, rule };
}

// --- state -------------------------------------------------------------------------------------------------

// A text from an address, if it is one of the options (or of their values); else the fallback.
export function among(options, text, fallback) {
  return options.map((o) => o.value ?? o).includes(text) ? text : fallback;
}

// The member of a rising list that a text from an address means; else the fallback.
export function member(values, text, fallback) {
  return values.includes(Number(text)) && text !== "" ? Number(text) : fallback;
}

// A function that runs `run` again after each call, one at a time, and only for the last of several calls.
// While it runs, `host` is aria-busy. A refusal of Python's is written to `tell`; the old drawing stays.
export function latest(host, run, tell) {
  let running = null, again = false;
  async function loop() {
    host.setAttribute("aria-busy", "true");
    do {
      again = false;
      try {
        await run();
      } catch (error) {
        if (error.fatal) throw error; // the page has put the figure back
        tell(error.message, true);
      }
    } while (again);
  }
  return () => {
    again = true;
    if (!running) {
      running = loop().finally(() => {
        running = null;
        host.setAttribute("aria-busy", "false");
      });
      running.catch(() => {}); // whoever wants to know awaits what is returned
    }
    return running;
  };
}

// --- formats -----------------------------------------------------------------------------------------------

// JSON's own writing of a number has all its digits.
export const exact = (value) => (typeof value === "string" ? value : JSON.stringify(value ?? null));

const scaled = (n, step, units, digits = 3) => {
  let i = 0;
  while (Math.round(Math.abs(n)) >= step && i < units.length - 1) [n, i] = [n / step, i + 1];
  return `${i === 0 || Math.abs(n) >= 10 ** (digits - 1) ? Math.round(n) : n.toPrecision(digits)} ${units[i]}`;
};
const binary = (n) => scaled(n, 1024, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]);
const decimal = (n) => scaled(n, 1000, ["B", "kB", "MB", "GB", "TB", "PB"]);
const number = (n) => n.toLocaleString("en");
const tokens = (n) => (n >= 2 ** 20 && n % 2 ** 20 === 0 ? `${n / 2 ** 20}M` : n >= 1024 && n % 1024 === 0 ? `${n / 1024}K` : number(n));
const short = (n, digits = 3) => Number(n.toPrecision(digits)).toLocaleString("en", { maximumFractionDigits: 20 });
function seconds(t) {
  for (const [scale, unit] of [[1, "s"], [1e-3, "ms"], [1e-6, "µs"]]) if (t >= scale) return `${short(t / scale)} ${unit}`;
  return t ? `${short(t / 1e-9)} ns` : "0 s";
}
const POWERS = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1, ""]];
function big(n, unit) {
  const [scale, letter] = POWERS.find(([power]) => n >= power) ?? [1, ""];
  return `${short(n / scale)} ${letter}${unit}`;
}
export const format = {
  big, // big(4.5e12, "FLOP/s"): 4.5 TFLOP/s
  binary, // 16.0 GiB
  decimal, // 17.2 GB
  bytes: (n) => (Math.abs(n) < 1000 ? binary(n) : `${binary(n)} (${decimal(n)})`),
  number, // 8,192
  short, // three digits
  tokens, // 8K: K is 1024
  seconds, // 4.48 ms
  tick: (n) => decimal(n).replace(/\.0+ /, " "), // 20 GB, for an axis
};
