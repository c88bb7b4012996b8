// A roofline in which batch and context move the points of decoding and of prefill.
const WAITS = {
  "memory: weights": "bytes: it waits for the weights",
  "memory: cache": "bytes: it waits for the cache",
  compute: "FLOPs: it waits for the multiplications",
};

export const title = "Roofline";

export async function start({ host, call, state, save, ui }) {
  const { format } = ui;
  const form = ui.form("roofline", await call("cost", { op: "form", of: "roofline" }), state, () => {
    save(form.told());
    update();
  });
  const { now } = form, batches = form.levels("batch");
  host.append(
    form.first,
    ui.legend([["neutral", "the roof"], ["weights", "decode, a circle; the line: other batches"], ["compute", "prefill, a square"]]),
  );
  let last;
  const redraw = ui.drawing(host, (width) => plot(last, width));
  const tell = ui.say(host), list = ui.facts(host);

  function plot({ device, ridge, decode, prefill, trace }, width) {
    const from = 0.25, to = Math.max(2 ** 18, 2 * prefill.intensity), tens = Array.from({ length: 20 }, (_, i) => 10 ** i);
    const chart = ui.chart({
      width,
      height: Math.min(340, Math.max(240, width * 0.5)),
      x: { from, to, ticks: [1, 10, 100, 1000, 10_000, 100_000, 1_000_000], label: "intensity, FLOPs per byte", text: format.number },
      y: { from: (device.bandwidth * from) / 4, to: device.peak * 3, ticks: tens, label: "FLOP/s at most", text: (v) => format.big(v, "") },
      label: `Roofline of ${now.hardware}: ridge at ${format.short(ridge)} FLOPs per byte, flat at ${format.big(device.peak, "FLOP/s")}. Decode at ${format.short(decode.intensity)} FLOPs per byte, ${format.big(decode.flops_per_second, "FLOP/s")}. Prefill at ${format.short(prefill.intensity)}, ${format.big(prefill.flops_per_second, "FLOP/s")}.`,
    });
    chart.rule(ridge, `ridge ${format.short(ridge)}`);
    chart.line([[from, from * device.bandwidth], [ridge, device.peak], [to, device.peak]], "neutral");
    chart.line(trace.map((p) => [p.intensity, p.flops_per_second]), "weights", true);
    chart.dot([prefill.intensity, prefill.flops_per_second], "compute", "square", "prefill");
    chart.dot([decode.intensity, decode.flops_per_second], "weights", "circle", "decode");
    return chart.node;
  }

  const update = ui.latest(host, async () => {
    last = await call("cost", { op: "roofline", ...form.asked(), batches });
    const { device, ridge, decode, prefill, max_batch } = last;
    redraw();
    const room = now.batch <= max_batch ? "" : ` So many do not fit into this device, though: ${max_batch === 0 ? "not one does" : `at most ${format.number(max_batch)} do`}.`;
    tell(`Decoding is bound by ${WAITS[decode.bound_by]}, ${format.seconds(decode.seconds)} a step. Prefill of ${format.tokens(now.context)} tokens is bound by ${WAITS[prefill.bound_by]}, ${format.seconds(prefill.seconds)}.${room}`);
    list([
      { key: "decode.seconds", label: "A decode step", text: format.seconds(decode.seconds), value: decode.seconds },
      { key: "decode.tokens_per_second", label: "Tokens per second, all sequences", text: format.short(decode.tokens_per_second), value: decode.tokens_per_second },
      { key: "decode.intensity", label: "Decode, FLOPs per byte", text: format.short(decode.intensity), value: decode.intensity },
      { key: "decode.flops_per_second", label: `Decode, of ${format.big(device.peak, "FLOP/s")} in ${device.compute_dtype}`, text: format.big(decode.flops_per_second, "FLOP/s"), value: decode.flops_per_second },
      { key: "decode.weights_bytes", label: "Weights that a step reads", text: format.bytes(decode.weights_bytes), value: decode.weights_bytes },
      { key: "decode.kv_bytes", label: "Cache that a step reads", text: format.bytes(decode.kv_bytes), value: decode.kv_bytes },
      { key: "prefill.seconds", label: `Prefill of ${format.tokens(now.context)} tokens`, text: format.seconds(prefill.seconds), value: prefill.seconds },
      { key: "prefill.intensity", label: "Prefill, FLOPs per byte", text: format.short(prefill.intensity), value: prefill.intensity },
      { key: "ridge", label: "Ridge of the device, FLOPs per byte", text: format.short(ridge), value: ridge },
      { key: "max_batch", label: "Such sequences that fit", text: format.number(max_batch), value: max_batch },
    ]);
  }, tell);
  await update();
}
