// A page allocator to step through. Actions are one string, which Python reads: "arrive A the cat_fork A B".

export const title = "A page allocator, step by step";

const STORIES = [
  {
    value: "fork",
    label: "Four answers to one prompt",
    size: 4,
    blocks: 8,
    script:
      "arrive A the cat sat on the_fork A B_fork A C_fork A D_append A mat_append B roof_append C sofa_append D grass" +
      "_finish A_finish B_finish C_finish D",
  },
  {
    value: "prefix",
    label: "A prefix is found again",
    size: 4,
    blocks: 8,
    script:
      "arrive A answer in one word : where is Rome_finish A_arrive B answer in one word : where is Oslo" +
      "_arrive C answer in one word : where is Rome today_append B Norway_finish C_finish B",
  },
  {
    value: "evict",
    label: "A full pool evicts",
    size: 2,
    blocks: 6,
    script:
      "arrive A one two three four_arrive B five six seven eight nine_finish A_arrive C ten eleven twelve thirteen fourteen" +
      "_finish B_arrive A one two three four_finish C_arrive D five six again_evict 1_evict",
  },
  {
    value: "refuse",
    label: "Refused, and nothing has changed",
    size: 4,
    blocks: 3,
    script:
      "arrive A the cat sat on the mat and purred softly_arrive B where is Rome_append A all day long_append A again" +
      "_finish A_arrive B where is Rome_crop B 2_fork B C_append C are we",
  },
];
const VERBS = [
  { value: "arrive", label: "arrive: a prompt comes" },
  { value: "append", label: "append: a sequence grows" },
  { value: "fork", label: "fork: a second one of the same tokens" },
  { value: "crop", label: "crop: only the first tokens stay" },
  { value: "finish", label: "finish: a sequence leaves" },
  { value: "evict", label: "evict: cached blocks are forgotten" },
];
const SIZES = [1, 2, 3, 4, 5, 6, 7, 8];
const BLOCKS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 20, 24, 32];
const PREFIX = [{ value: "on", label: "kept for the next prompt" }, { value: "off", label: "forgotten at once" }];
const STATES = { live: "in use", cached: "free, can be found", empty: "free" };
const CHANGES = {
  found: "found again",
  shared: "one owner more",
  evicted: "evicted",
  forgotten: "changed",
  taken: "taken",
  left: "one owner fewer",
  cached: "freed, kept",
  emptied: "freed",
};

const pieces = (script) => script.split("_").map((piece) => piece.trim()).filter(Boolean);
const percent = (share) => share.toLocaleString("en", { style: "percent", maximumFractionDigits: 1 }).replace("%", " %");
const many = (n, thing) => `${n} ${thing}${n === 1 ? "" : "s"}`;

export async function start({ host, call, state, save, ui }) {
  const { el, exact } = ui;
  const id = (name) => `allocator-${name}`;
  const now = { size: 4, blocks: 8, prefix: "on", actions: [], at: 0 };
  let frames = [];

  // --- what is drawn ---------------------------------------------------------------------------------------

  const value = (key, of, text, props) => el("span", { "data-key": key, "data-value": exact(of), ...props }, text ?? exact(of));

  function tables(frame) {
    const rows = Object.entries(frame.sequences).map(([name, one]) =>
      el("li", {},
        el("b", {}, name), " ",
        value(`sequences.${name}.length`, one.length, many(one.length, "token")),
        value(`sequences.${name}.shared`, one.shared, one.shared ? `, ${one.shared} found` : ""),
        ": ",
        el("span", { class: "steps-table", "data-key": `sequences.${name}.blocks`, "data-value": exact(one.blocks) },
          one.blocks.length ? one.blocks.map((block) => el("span", {}, block)) : "no block")));
    return rows.length ? rows : [el("li", {}, "none")];
  }

  function block(frame, one) {
    const owners = Object.keys(frame.sequences).filter((name) => frame.sequences[name].blocks.includes(one.id));
    const happened = Object.keys(CHANGES).filter((what) => frame.changed[what]?.includes(one.id)).map((what) => CHANGES[what]);
    for (const [from, to] of frame.copies) {
      if (to === one.id) happened.push(`copied from ${from}`);
      if (from === one.id) happened.push(`copied to ${to}`);
    }
    const slots = Array.from({ length: one.refs ? now.size : one.tokens.length }, (_, k) =>
      k < one.tokens.length
        ? el("li", { class: "steps-word" }, one.tokens[k])
        : el("li", { class: "steps-slot" }, el("span", { class: "steps-hidden" }, "empty slot")));
    const turn = frame.eviction_order.indexOf(one.id);
    const key = `pool.${one.id}`;
    return el("li", { class: `steps-block steps-${one.state}`, "data-changed": happened.length > 0 },
      el("div", { class: "steps-head" },
        el("b", {}, one.id), " ",
        value(`${key}.state`, one.state, STATES[one.state])),
      el("div", {},
        value(`${key}.refs`, one.refs, one.refs ? `${many(one.refs, "owner")}: ${owners.join(" ")}` : ""),
        value(`${key}.findable`, one.findable, one.findable && one.refs ? " (can be found)" : "")),
      el("ul", { class: "steps-slots", "data-key": `${key}.tokens`, "data-value": exact(one.tokens) }, slots),
      el("div", { class: "steps-note" }, [...happened, turn < 0 ? null : turn ? `evicted after ${turn}` : "evicted next"].filter(Boolean).join(", ")));
  }

  const facts = (frame) => [
    ["free", "free blocks", frame.free],
    ["usage.blocks_live", "blocks in use", frame.usage.blocks_live],
    ["usage.blocks_cached", "free blocks that can be found", frame.usage.blocks_cached],
    ["usage.slots_filled", "slots filled", frame.usage.slots_filled],
    ["usage.waste", "slots taken and empty (waste)", frame.usage.waste],
    ["usage.utilisation_tokens", "filled, of the slots taken", frame.usage.utilisation_tokens, percent],
    ["usage.utilisation_blocks", "in use, of all blocks", frame.usage.utilisation_blocks, percent],
    ["usage.hit_rate", "prompt tokens found, of all so far", frame.usage.hit_rate, percent],
    ["copies", "copies made in this step", frame.copies,
      (pairs) => pairs.map(([from, to]) => `block ${from} to ${to}`).join(", ") || "none"],
    ["eviction_order", "order of eviction", frame.eviction_order, (ids) => ids.join(", ") || "nothing cached"],
  ].map(([key, label, of, text = ui.format.number]) => ({ key, label, value: of, text: text(of) }));

  const sequences = el("ul", { class: "steps-sequences" });
  const pool = el("ul", { class: "steps-pool" });
  const history = el("ol", { class: "steps-history", start: 0 });
  const later = el("p", { class: "steps-later" });
  const figures = el("div", {});
  const showFacts = ui.facts(figures);

  function draw() {
    const frame = frames[now.at], last = frames.length - 1;
    sequences.replaceChildren(...tables(frame));
    pool.replaceChildren(...frame.pool.map((one) => block(frame, one)));
    showFacts(facts(frame));
    [...history.children].forEach((row, k) => {
      row.firstChild.toggleAttribute("aria-current", false);
      if (k === now.at) row.firstChild.setAttribute("aria-current", "step");
    });
    step.control.max = last;
    step.set(now.at);
    for (const [button, off] of [[first, !now.at], [back, !now.at], [next, now.at === last], [end, now.at === last]]) {
      if (off) button.setAttribute("aria-disabled", "true");
      else button.removeAttribute("aria-disabled");
    }
    later.textContent = now.at < last ? `What you do here follows step ${now.at} and replaces the steps after it.` : "";
    const known = Object.keys(frame.sequences), chosen = who.control.value;
    who.control.replaceChildren(...known.map((name) => el("option", { value: name }, name)));
    who.set(known.includes(chosen) ? chosen : known.at(-1));
    story.set(STORIES.find((s) => s.size === now.size && s.blocks === now.blocks && now.prefix === "on"
      && s.script === now.actions.join("_"))?.value ?? "own");
    host.dataset.at = now.at;
    tell(`Step ${now.at} of ${last}. ${frame.told}`, frame.error !== null);
    save({ do: now.actions.join("_"), size: now.size, blocks: now.blocks, prefix: now.prefix, at: now.at });
  }

  function go(at) {
    now.at = Math.max(0, Math.min(at, frames.length - 1));
    draw();
  }

  // --- what is asked of Python -----------------------------------------------------------------------------

  async function run() {
    const asked = { num_blocks: now.blocks, block_size: now.size, prefix: now.prefix === "on", script: now.actions.join("_") };
    const reply = await call("paging", asked);
    frames = reply.frames;
    now.at = Math.min(now.at, frames.length - 1);
    history.replaceChildren(...["", ...now.actions].map((text, k) =>
      el("li", {}, ui.button(k ? text : "an empty pool", () => go(k), { class: frames[k].error === null ? "" : "steps-refused" }),
        frames[k].error === null ? null : " refused")));
    draw();
  }

  function load(chosen) {
    const found = STORIES.find((s) => s.value === chosen);
    if (found) Object.assign(now, { size: found.size, blocks: found.blocks, prefix: "on", actions: pieces(found.script), at: 1 });
    else Object.assign(now, { actions: [], at: 0 });
    for (const row of [size, blocks, prefix]) row.set(now[row.name]);
    return update();
  }

  function act() {
    const verb = what.control.value, name = who.control.value, parts = [verb];
    if (verb === "arrive") parts.push(newName());
    else if (verb !== "evict") parts.push(name || "nobody");
    if (verb === "fork") parts.push(newName());
    if (verb in texts) parts.push(texts[verb].control.value.replaceAll("_", " "));
    if (verb in counts) parts.push(counts[verb].control.value);
    now.actions = [...now.actions.slice(0, now.at), pieces(parts.join(" ")).join(" ").replace(/\s+/g, " ")];
    now.at = now.actions.length;
    update();
  }

  // The first letter that no sequence has had so far.
  function newName() {
    const had = new Set(now.actions.slice(0, now.at).flatMap((piece) => {
      const [verb, one, two] = piece.split(/\s+/);
      return verb === "fork" ? [one, two] : [one];
    }));
    const letters = [..."ABCDEFGHIJKLMNOPQRSTUVWXYZ"];
    return letters.find((c) => !had.has(c)) ?? letters.map((c) => c + c).find((c) => !had.has(c)) ?? "Z";
  }

  // --- controls --------------------------------------------------------------------------------------------

  const changed = (name) => (to) => {
    now[name] = to;
    update();
  };
  const story = ui.choose({
    id: id("story"),
    label: "A story to follow",
    options: [...STORIES, { value: "own", label: "your own, from an empty pool" }],
    value: "fork",
    onChange: load,
  });
  const size = ui.range({ id: id("size"), label: "Tokens per block", values: SIZES, value: now.size, onInput: changed("size") });
  const blocks = ui.range({ id: id("blocks"), label: "Blocks in the pool", values: BLOCKS, value: now.blocks, onInput: changed("blocks") });
  const prefix = ui.choose({ id: id("prefix"), label: "Full blocks of those who left", options: PREFIX, value: now.prefix, onChange: changed("prefix") });
  Object.assign(size, { name: "size" });
  Object.assign(blocks, { name: "blocks" });
  Object.assign(prefix, { name: "prefix" });

  const step = ui.range({
    id: id("step"), label: "Step", min: 0, max: 1, value: 0, onInput: go,
    text: (k) => `${k} of ${Math.max(0, frames.length - 1)}`,
  });
  const first = ui.button("First", () => go(0));
  const back = ui.button("Back", () => go(now.at - 1));
  const next = ui.button("Forward", () => go(now.at + 1));
  const end = ui.button("Last", () => go(frames.length - 1));

  const field = (name, label, props) => {
    const control = el("input", { id: id(name), ...props });
    const row = el("div", { class: "live-row" }, el("label", { for: id(name) }, label), control);
    return Object.assign(row, { control });
  };
  const words = (name, label, text) => field(name, label, { type: "text", value: text, autocomplete: "off", spellcheck: "false" });
  const number = (name, label, of) => field(name, label, { type: "number", min: 0, step: 1, value: of, inputmode: "numeric" });
  const texts = {
    arrive: words("prompt", "Words of the prompt", "the cat sat on the"),
    append: words("words", "Words to append", "mat"),
  };
  const counts = { crop: number("keep", "Tokens to keep", 2), evict: number("count", "Blocks to evict", 1) };
  const who = ui.choose({ id: id("who"), label: "Sequence", options: [], value: "" });
  const fit = () => {
    const verb = what.control.value;
    who.hidden = verb === "arrive" || verb === "evict";
    for (const [name, row] of Object.entries({ ...texts, ...counts })) row.hidden = name !== verb;
  };
  const what = ui.choose({ id: id("what"), label: "What happens next", options: VERBS, value: "arrive", onChange: fit });
  fit();
  const form = el("form", {
    class: "steps-form",
    onsubmit: (event) => {
      event.preventDefault();
      act();
    },
  },
    what, who, ...Object.values(texts), ...Object.values(counts),
    el("div", { class: "live-buttons" }, el("button", { type: "submit", class: "live-button" }, "Do it")), later);

  const part = (name, ...children) => el("div", { role: "group", "aria-labelledby": id(name) }, ...children);
  const heading = (name, text) => el("p", { class: "steps-title", id: id(name) }, text);
  host.classList.add("steps");
  host.append(story,
    el("div", { class: "live-buttons", role: "group", "aria-label": "Steps" }, first, back, next, end), step);
  const tell = ui.say(host);
  host.append(
    part("sequences", heading("sequences", "Sequences and their tables"), sequences),
    part("pool", heading("pool", "Blocks of the pool"), pool),
    part("numbers", heading("numbers", "Numbers of this step"), figures),
    part("do", heading("do", "Your turn"), form),
    part("settings", heading("settings", "The pool"), size, blocks, prefix),
    el("details", {}, el("summary", {}, "All steps"), history));

  // --- from the address ------------------------------------------------------------------------------------

  const update = ui.latest(host, run, tell);
  if (state.do !== undefined) {
    now.size = ui.member(SIZES, state.size, now.size);
    now.blocks = ui.member(BLOCKS, state.blocks, now.blocks);
    now.prefix = ui.among(PREFIX, state.prefix, now.prefix);
    now.actions = pieces(state.do);
    now.at = /^\d{1,4}$/.test(state.at ?? "") ? Number(state.at) : now.actions.length;
    for (const row of [size, blocks, prefix]) row.set(now[row.name]);
    await update();
  }
  if (!frames.length) await load(STORIES[0].value);
}
