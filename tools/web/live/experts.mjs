// What a step of a mixture of experts reads: experts touched against batch, and its dense twins.
const ROWS = [
  ["mixture", "the mixture", "weights", false],
  ["active", "dense twin, active parameters", "neutral", true],
  ["total", "dense twin, all parameters", "compute", true],
];

export const title = "Experts touched";

export async function start({ host, call, state, save, ui }) {
  const { el, format } = ui;
  const form = ui.form("experts", await call("cost", { op: "form", of: "experts" }), state, () => {
    save(form.told());
    update();
  });
  const { now } = form, batches = form.levels("batch");
  const cells = el("div", { class: "live-cells", role: "img" });
  host.append(
    form.first,
    el("p", { class: "live-caption" }, "The experts of one layer; filled: touched by a step, on average."),
    cells,
    ui.legend(ROWS.map(([, label, kind]) => [kind, label])),
  );
  let last;
  const charts = el("div", { class: "live-pair" });
  host.append(charts);
  const redraw = [
    ui.drawing(charts, (width) => plot(width, "weights_bytes", "bytes of weights per step", format.tick)),
    ui.drawing(charts, (width) => plot(width, "seconds", "predicted time of a step", format.seconds)),
  ];
  const tell = ui.say(host), list = ui.facts(host);

  function plot(width, key, label, text) {
    const all = last.curve.flatMap((row) => ROWS.map(([name]) => row[name][key]));
    const ticks = Array.from({ length: 36 }, (_, i) => [1, 2, 5].map((m) => m * 10 ** (i - 18))).flat();
    const chart = ui.chart({
      width,
      x: { from: batches[0], to: batches.at(-1), ticks: [1, 4, 16, 64, 256, 1024, 4096], label: "users at once", text: format.number },
      y: { from: Math.min(...all) / 1.3, to: Math.max(...all) * 1.3, ticks, label, text },
      label: `${label} against users at once. At ${format.number(now.batch)}: ${ROWS.map(([name, words]) => `${words} ${text(last.now[name][key])}`).join(", ")}.`,
    });
    for (const [name, , kind, dashed] of ROWS) chart.line(last.curve.map((row) => [row.batch, row[name][key]]), kind, dashed);
    for (const [name, , kind] of [...ROWS].reverse()) chart.dot([now.batch, last.now[name][key]], kind, name === "mixture" ? "circle" : "square");
    return chart.node;
  }

  function fillCells({ experts, now: { touched } }) {
    const filled = (i) => (i + 1 <= touched ? 100 : i >= touched ? 0 : 100 * (touched - i));
    cells.replaceChildren(...Array.from({ length: experts }, (_, i) =>
      el("span", { class: "live-cell", style: `--filled: ${filled(i)}%` })));
    cells.setAttribute("aria-label", `${format.short(touched, 4)} of ${experts} experts touched`);
  }

  const update = ui.latest(host, async () => {
    last = await call("cost", { op: "experts", ...form.asked(), batches });
    const at = last.now;
    fillCells(last);
    redraw.forEach((again) => again());
    const room = now.batch <= last.max_batch ? "" : ` So many do not fit into this device: ${last.max_batch === 0 ? "not one does" : `at most ${format.number(last.max_batch)} do`}.`;
    tell(`${format.number(now.batch)} ${now.batch === 1 ? "user touches" : "users touch"} ${format.short(at.touched, 4)} of ${last.experts} experts in each layer. A step reads ${format.decimal(at.mixture.weights_bytes)} of weights; the small dense twin ${format.decimal(at.active.weights_bytes)}, the large one ${format.decimal(at.total.weights_bytes)}.${room}`);
    const row = (name, key, label, text) => ({ key: `${name}.${key}`, label, text: text(at[name][key]), value: at[name][key] });
    list([
      { key: "touched", label: "Experts touched in a layer", text: `${format.short(at.touched, 5)} of ${last.experts}, ${last.top_k} for each token`, value: at.touched },
      { key: "held_bytes", label: "Weights that are stored", text: format.bytes(last.held_bytes), value: last.held_bytes },
      ...ROWS.flatMap(([name, label]) => [
        row(name, "weights_bytes", `Read per step: ${label}`, format.bytes),
        row(name, "seconds", `Time of a step: ${label}`, format.seconds),
      ]),
      { key: "max_batch", label: "Such users that fit", text: format.number(last.max_batch), value: last.max_batch },
    ]);
  }, tell);
  await update();
}
