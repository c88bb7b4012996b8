// Continuous batching: what the scheduler decides in every step, for requests and a server of the reader's own.

export const title = "A scheduler of continuous batches, step by step";

const STORIES = [
  {
    value: "half",
    label: "Half the memory: who gives way",
    set: { count: 4, spacing: 0, prompt: 8, reply: 20, mix: "prompts", blocks: 14, size: 4, running: 4, budget: 32, prefix: "off", clock: "steps" },
  },
  {
    value: "chunks",
    label: "A long prompt among three writers",
    set: { count: 4, spacing: 2, prompt: 128, reply: 24, mix: "long", blocks: 256, size: 16, running: 4, budget: 512, prefix: "off", clock: "h100" },
  },
  {
    value: "seats",
    label: "Short and long answers, four seats",
    set: { count: 10, spacing: 0, prompt: 6, reply: 16, mix: "replies", blocks: 64, size: 4, running: 4, budget: 64, prefix: "off", clock: "steps" },
  },
  {
    value: "shared",
    label: "Prompts that begin alike",
    set: { count: 6, spacing: 4, prompt: 64, reply: 12, mix: "shared", blocks: 48, size: 4, running: 4, budget: 16, prefix: "on", clock: "steps" },
  },
];
const MIXES = [
  { value: "alike", label: "all alike" },
  { value: "prompts", label: "prompts of different lengths" },
  { value: "replies", label: "replies of different lengths" },
  { value: "long", label: "the last prompt 16 times as long" },
  { value: "shared", label: "prompts that begin alike" },
];
const PREFIX = [{ value: "off", label: "off" }, { value: "on", label: "on" }];
const CLOCKS = [
  { value: "steps", label: "counts steps" },
  { value: "h100", label: "Llama-3.1-8B on an H100" },
];
const COSTS = { steps: { step_s: 1, token_s: 0 }, h100: { model: "llama-3.1-8b", hardware: "h100-sxm" } };

const LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256, 384, 512, 1024];
const SLIDERS = {
  count: ["Requests", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]],
  spacing: ["Steps between arrivals", [0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32]],
  prompt: ["Tokens in a prompt", LENGTHS],
  reply: ["Tokens in a reply", LENGTHS.filter((n) => n <= 128)],
  blocks: ["Blocks in the pool", [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 30, 32, 36,
    40, 48, 56, 64, 80, 96, 128, 192, 256, 384, 512, 1024]],
  size: ["Tokens per block", [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64]],
  running: ["Seats for requests", [1, 2, 3, 4, 5, 6, 7, 8, 10, 12]],
  budget: ["Tokens per step at most", [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096]],
};
const CHOICES = {
  mix: ["Lengths", MIXES],
  prefix: ["Prefix cache", PREFIX],
  clock: ["The clock", CLOCKS],
};
const KINDS = [
  ["prefill", "reads its prompt"],
  ["decode", "writes one token"],
  ["again", "computes what it had before"],
  ["waiting", "waits for its first step"],
  ["back", "waits after giving its blocks back"],
];
const [LANE, GAP, LEFT, CHART] = [18, 6, 34, 64]; // heights and a margin of the drawing, in pixels

export async function start({ host, call, state, save, ui }) {
  const { el, svg, exact } = ui;
  const id = (name) => `scheduler-${name}`;
  const now = { ...STORIES[0].set, at: 0 };
  const names = Object.keys(STORIES[0].set);
  let result = null, shown = null; // the reply, and the setting that it answers

  const time = (t) => {
    if (t === null) return "none";
    if (shown.clock === "h100") return ui.format.seconds(t);
    return `${ui.format.short(t)} step${t === 1 ? "" : "s"}`;
  };
  const bare = (t) => (t !== null && shown.clock === "steps" ? ui.format.short(t) : time(t)); // the caption has the unit
  const number = ui.format.number;

  // --- the drawing -----------------------------------------------------------------------------------------

  function timeline(wide) {
    if (!result) return svg("svg", {});
    const top = result.requests.length * (LANE + GAP) + 28, high = top + CHART + 20;
    const x = (t) => LEFT + (t / result.seconds) * (wide - LEFT - 2);
    const y = (row) => row * (LANE + GAP);
    const bar = (from, to, at, height, props) =>
      svg("rect", { x: x(from), width: Math.max(0.5, x(to) - x(from) - (x(to) - x(from) > 4 ? 1 : 0)), y: at, height, ...props });
    const picture = svg("svg", { class: "steps-plot", viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": summary() });
    result.requests.forEach((one, row) => {
      picture.append(svg("text", { x: 0, y: y(row) + 14 }, one.id));
      if (one.refused) picture.append(svg("text", { x: LEFT, y: y(row) + 14 }, "refused"));
    });
    result.waits.forEach((wait, k) => picture.append(
      bar(wait.start_s, wait.end_s, y(wait.row) + LANE / 2 - (wait.kind === "waiting" ? 1 : 2), wait.kind === "waiting" ? 2 : 4,
        { class: `steps-${wait.kind}`, "data-key": `waits.${k}.kind`, "data-value": wait.kind })));
    result.steps.forEach((step, s) => step.parts.forEach((part, k) => {
      const [from, to] = [step.start_s, step.start_s + step.seconds], small = part.kind === "decode";
      picture.append(bar(from, to, y(part.row) + (small ? 4 : 0), small ? LANE - 8 : LANE,
        { class: `steps-${part.kind}`, "data-key": `steps.${s}.parts.${k}.count`, "data-value": part.count }));
      if (!small && x(to) - x(from) > 9 * String(part.count).length)
        picture.append(svg("text", { x: (x(from) + x(to)) / 2, y: y(part.row) + 13, class: `steps-count steps-on-${part.kind}` }, part.count));
    }));
    // Blocks after each step: in use from below, then those that can be found again.
    const level = (n) => top + CHART - (n / shown.blocks) * CHART;
    for (const [kind, from, to] of [["live", () => 0, (s) => s.blocks_live],
      ["cached", (s) => s.blocks_live, (s) => s.blocks_live + s.blocks_cached]])
      picture.append(svg("path", { class: `steps-area-${kind}`, d: result.steps.map((s) =>
        `M${x(s.start_s)} ${level(from(s))}V${level(to(s))}H${x(s.start_s + s.seconds)}V${level(from(s))}Z`).join("") }));
    picture.append(
      svg("path", { class: "live-axis", d: `M${LEFT} ${top}H${wide - 2}M${LEFT} ${top + CHART}H${wide - 2}` }),
      svg("text", { x: 0, y: top + 10 }, shown.blocks), svg("text", { x: 0, y: top + CHART }, "0"),
      svg("text", { x: LEFT, y: high - 5 }, "0"),
      svg("text", { x: wide - 2, y: high - 5, "text-anchor": "end" }, time(result.seconds)),
      mark,
      svg("text", { x: LEFT, y: top - 6, class: "steps-over" },
        `blocks in use after each step${result.steps.some((s) => s.blocks_cached) ? " (lighter: can be found)" : ""}`));
    picture.onclick = (event) => {
      const at = ((event.offsetX / picture.clientWidth) * wide - LEFT) / (wide - LEFT - 2) * result.seconds;
      go(result.steps.findLastIndex((s) => s.start_s <= at));
    };
    place = (step) => {
      const [from, to] = step ? [x(step.start_s), x(step.start_s + step.seconds)] : [0, 0];
      for (const [name, of] of Object.entries({ x: from - 1, width: Math.max(2, to - from + 1), y: 0, height: top + CHART })) mark.setAttribute(name, of);
    };
    place(result.steps[now.at]);
    return picture;
  }
  const mark = svg("rect", { class: "steps-mark" });
  let place = () => {};

  const summary = () => {
    const t = result.totals;
    return `Timeline of ${result.requests.length} requests over ${t.steps} steps and ${time(result.seconds)}: `
      + `${t.preemptions} times a request gave its blocks back, ${number(t.again)} tokens were computed twice, `
      + `at most ${t.blocks_live_max} of ${shown.blocks} blocks were in use after a step.`;
  };

  // --- numbers and words -----------------------------------------------------------------------------------

  const fact = (key, label, value, text = number) => ({ key, label, value, text: text(value) });
  const totals = () => [
    fact("totals.ttft_mean_s", "TTFT, mean", result.totals.ttft_mean_s, time),
    fact("totals.ttft_max_s", "TTFT, worst", result.totals.ttft_max_s, time),
    fact("totals.itl_mean_s", "ITL, mean", result.totals.itl_mean_s, time),
    fact("totals.itl_max_s", "ITL, worst", result.totals.itl_max_s, time),
    fact("seconds", "until all is done", result.seconds, time),
    fact("tokens_per_second", shown.clock === "h100" ? "tokens per second" : "tokens per step", result.tokens_per_second, ui.format.short),
    fact("totals.tokens", "tokens written", result.totals.tokens),
    fact("totals.steps", "steps", result.totals.steps),
    fact("totals.computed", "tokens computed", result.totals.computed),
    fact("totals.again", "of them for the second time", result.totals.again),
    fact("totals.preemptions", "blocks given back, times", result.totals.preemptions),
    fact("totals.blocks_live_max", "most blocks in use after a step", result.totals.blocks_live_max),
    fact("totals.refused", "requests refused", result.totals.refused),
  ];
  const ofStep = (step, k) => [
    fact(`steps.${k}.start_s`, "begins at", step.start_s, time),
    fact(`steps.${k}.seconds`, "takes", step.seconds, time),
    fact(`steps.${k}.tokens`, `tokens computed, of ${number(shown.budget)}`, step.tokens),
    fact(`steps.${k}.blocks_live`, `blocks in use after it, of ${number(shown.blocks)}`, step.blocks_live),
    fact(`steps.${k}.blocks_cached`, "free blocks that can be found", step.blocks_cached),
    fact(`steps.${k}.running`, "running after it", step.running),
    fact(`steps.${k}.waiting`, "waiting after it", step.waiting),
  ];
  const COLUMNS = [
    ["prompt_tokens", "prompt", number], ["cached_tokens", "found", number], ["new_tokens", "reply", number],
    ["arrival_s", "arrives", bare], ["ttft_s", "TTFT", bare], ["itl_mean_s", "ITL mean", bare], ["itl_max_s", "ITL worst", bare],
    ["preemptions", "sent back", number], ["again", "again", number],
  ];
  const head = el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "request"), COLUMNS.map(([, label]) => el("th", { scope: "col" }, label))));
  const body = el("tbody", {}), caption = el("p", { class: "steps-caption" });
  const requests = () => result.requests.map((one, row) => el("tr", {},
    el("th", { scope: "row" }, one.id),
    one.refused
      ? el("td", { colspan: COLUMNS.length, "data-key": `requests.${row}.refused`, "data-value": one.refused }, `refused: ${one.refused}`)
      : COLUMNS.map(([key, , text]) => el("td", { "data-key": `requests.${row}.${key}`, "data-value": exact(one[key]) }, text(one[key])))));

  const figures = el("div", {}), stepFigures = el("div", {});
  const showTotals = ui.facts(figures), showStep = ui.facts(stepFigures);

  function draw() {
    const last = result.steps.length - 1, at = result.steps[now.at];
    step.control.max = Math.max(0, last);
    step.set(now.at);
    for (const [button, off] of [[first, now.at <= 0], [back, now.at <= 0], [next, now.at >= last], [end, now.at >= last]]) {
      if (off) button.setAttribute("aria-disabled", "true");
      else button.removeAttribute("aria-disabled");
    }
    place(at);
    showStep(at ? ofStep(at, now.at) : []);
    host.dataset.at = now.at;
    tell(at ? `Step ${now.at + 1} of ${last + 1}. ${at.decided.join(" ")}` : "No request could be served.", !at);
    story.set(STORIES.find((s) => names.every((name) => s.set[name] === shown[name]))?.value ?? "own");
    save({ ...Object.fromEntries(names.map((name) => [name, shown[name]])), at: now.at });
  }

  function go(at) {
    now.at = Math.max(0, Math.min(at, result.steps.length - 1));
    draw();
  }

  // --- what is asked of Python -----------------------------------------------------------------------------

  async function run() {
    const asked = { ...now };
    result = await call("serving", {
      num_blocks: asked.blocks,
      block_size: asked.size,
      max_running: asked.running,
      max_tokens_per_step: asked.budget,
      prefix_caching: asked.prefix === "on",
      cost: COSTS[asked.clock],
      traffic: { count: asked.count, spacing: asked.spacing, prompt: asked.prompt, reply: asked.reply, mix: asked.mix },
    });
    shown = asked;
    now.at = Math.max(0, Math.min(now.at, result.steps.length - 1));
    showTotals(totals());
    body.replaceChildren(...requests());
    caption.textContent = `Tokens of the prompt, and those found in the cache; of the reply; computed again.${shown.clock === "steps" ? " Times in steps." : ""}`;
    redraw();
    draw();
  }

  function load(chosen) {
    const found = STORIES.find((s) => s.value === chosen);
    if (found) Object.assign(now, found.set, { at: 0 });
    for (const name of names) rows[name].set(now[name]);
    return update();
  }

  // --- controls --------------------------------------------------------------------------------------------

  const story = ui.choose({
    id: id("story"),
    label: "A story to follow",
    options: [...STORIES, { value: "own", label: "your own numbers, below" }],
    value: STORIES[0].value,
    onChange: load,
  });
  const changed = (name) => (to) => {
    now[name] = to;
    update();
  };
  const rows = {};
  for (const [name, [label, values]] of Object.entries(SLIDERS))
    rows[name] = ui.range({ id: id(name), label, values, value: now[name], text: number, onInput: changed(name) });
  for (const [name, [label, options]] of Object.entries(CHOICES))
    rows[name] = ui.choose({ id: id(name), label, options, value: now[name], onChange: changed(name) });

  const step = ui.range({
    id: id("step"), label: "Step", min: 0, max: 1, value: 0, onInput: go,
    text: (k) => `${k + 1} of ${result?.steps.length ?? 1}`,
  });
  const first = ui.button("First", () => go(0));
  const back = ui.button("Back", () => go(now.at - 1));
  const next = ui.button("Forward", () => go(now.at + 1));
  const end = ui.button("Last", () => go(result.steps.length - 1));

  const heading = (name, text) => el("p", { class: "steps-title", id: id(name) }, text);
  const part = (name, text, ...children) => el("div", { role: "group", "aria-labelledby": id(name) }, heading(name, text), ...children);
  host.classList.add("steps");
  host.append(story);
  const redraw = ui.drawing(host, timeline);
  host.append(
    el("ul", { class: "live-legend" }, KINDS.map(([kind, label]) =>
      el("li", {}, el("span", { class: `live-swatch steps-key steps-${kind}` }), label))),
    el("div", { class: "live-buttons", role: "group", "aria-label": "Steps" }, first, back, next, end), step);
  const tell = ui.say(host);
  host.append(
    part("traffic", "Who comes", ...["count", "spacing", "prompt", "reply", "mix"].map((name) => rows[name])),
    part("server", "The server", ...["blocks", "size", "running", "budget", "prefix", "clock"].map((name) => rows[name])),
    part("this", "This step", stepFigures),
    part("all", "All steps together", figures),
    part("each", "Each request", el("div", { class: "steps-scroll", tabindex: 0, role: "region", "aria-label": "Each request" },
      el("table", {}, head, body)), caption));
  // --- from the address ------------------------------------------------------------------------------------

  const update = ui.latest(host, run, tell);
  for (const [name, [, values]] of Object.entries(SLIDERS)) now[name] = ui.member(values, state[name] ?? "", now[name]);
  for (const [name, [, options]] of Object.entries(CHOICES)) now[name] = ui.among(options, state[name], now[name]);
  if (/^\d{1,5}$/.test(state.at ?? "")) now.at = Number(state.at);
  for (const name of names) rows[name].set(now[name]);
  await update();
  if (!result) await load(STORIES[0].value);
}
