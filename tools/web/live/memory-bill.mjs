// The memory bill: what one device holds, and the line of what it has.
const BARS = [4, 16, 32, 64, 128, 256].map((n) => n * 1024);
const BOUND = {
  "memory: capacity": "It does not fit: memory gives out first.",
  "memory: weights": "A decode step waits for the weights to be read.",
  "memory: cache": "A decode step waits for the cache to be read.",
  compute: "A decode step waits for its multiplications.",
  communication: "A decode step waits for the devices to exchange what they have.",
  overhead: "A decode step waits for its launches.",
};

export const title = "Memory bill";

export async function start({ host, call, state, save, ui }) {
  const { el, format } = ui;
  const form = ui.form("memory-bill", await call("cost", { op: "form", of: "bill" }), state, () => {
    save(form.told());
    update();
  });

  const bars = el("div", { class: "live-bars", role: "img" });
  const kinds = ui.legend([["weights", "weights"], ["cache", "cache"], ["limit", "memory of the device"], ["neutral", "activations and runtime"]]);
  host.append(form.first, form.more, kinds, bars);
  const tell = ui.say(host), list = ui.facts(host), warn = el("ul", { class: "live-warnings" });
  host.append(warn);

  function bar(b, capacity, most, chosen) {
    const share = (bytes) => `${(100 * bytes) / most}%`;
    const part = (kind, key) => el("span", { class: `live-part live-${kind}`, style: `width: ${share(b[key])}`, "data-key": `${chosen ? "" : `${b.context}-`}${key}`, "data-value": b[key] });
    const rest = share(b.bytes_per_device - b.weights_bytes_per_device - b.kv_bytes_per_device);
    return el("div", { class: chosen ? "live-bar live-chosen" : "live-bar" },
      el("span", { class: "live-bar-name" }, format.tokens(b.context)),
      el("span", { class: "live-bar-room" },
        part("weights", "weights_bytes_per_device"), part("cache", "kv_bytes_per_device"), el("span", { class: "live-part live-neutral", style: `width: ${rest}` }),
        el("span", { class: "live-limit", style: `left: ${share(capacity)}` })),
      el("span", { class: "live-bar-sum" }, `${format.decimal(b.bytes_per_device)}${b.fits ? "" : ", too much"}`));
  }

  function draw({ sizing: s, bars: rows }) {
    const most = Math.max(s.device_bytes, ...[s, ...rows].map((b) => b.bytes_per_device));
    bars.replaceChildren(bar(s, s.device_bytes, most, true), ...rows.map((b) => bar(b, s.device_bytes, most, false)));
    kinds.lastChild.hidden = s.bytes_per_device === s.weights_bytes_per_device + s.kv_bytes_per_device;
    const each = s.devices > 1 ? "on each device" : "on the device";
    bars.setAttribute("aria-label", `Weights ${format.decimal(s.weights_bytes_per_device)} and cache ${format.decimal(s.kv_bytes_per_device)} ${each}, which has ${format.decimal(s.device_bytes)}; below it the same model and batch at ${rows.map((b) => format.tokens(b.context)).join(", ")} tokens.`);
    tell(`${s.fits ? "It fits" : "It does not fit"}: ${format.decimal(s.bytes_per_device)} of ${format.decimal(s.device_bytes)} ${each}. ${s.max_batch === 0 ? "Not one user of this length fits." : `${format.number(s.max_batch)} ${s.max_batch === 1 ? "user" : "users"} of this length would fit.`}`);
    list([
      { key: "weights_bytes", label: "Weights, all devices", text: format.bytes(s.weights_bytes), value: s.weights_bytes },
      { key: "kv_bytes", label: "Cache of the batch", text: format.bytes(s.kv_bytes), value: s.kv_bytes },
      { key: "kv_bytes_per_token", label: "Cache of one token", text: format.bytes(s.kv_bytes_per_token), value: s.kv_bytes_per_token },
      { key: "max_batch", label: "Users of this length that fit", text: format.number(s.max_batch), value: s.max_batch },
      { key: "max_context", label: "Longest context of this batch", text: s.max_context === null ? "no limit, it stops growing" : `${format.number(s.max_context)} tokens`, value: s.max_context },
      { key: "decode_seconds", label: "A decode step, at best", text: s.decode_seconds === null ? "does not fit" : format.seconds(s.decode_seconds), value: s.decode_seconds },
      { key: "ttft_seconds", label: "Reading one such prompt, at best", text: s.ttft_seconds === null ? "does not fit" : format.seconds(s.ttft_seconds), value: s.ttft_seconds },
      { key: "bound_by", label: "What binds", text: BOUND[s.bound_by] ?? s.bound_by, value: s.bound_by },
    ]);
    warn.replaceChildren(...s.warnings.map((text) => el("li", {}, text)));
  }

  const update = ui.latest(host, async () => {
    draw(await call("cost", { op: "bill", ...form.asked(), contexts: BARS }));
  }, tell);
  await update();
}
