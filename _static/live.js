/* Turns <div data-live="NAME"></div> into a part that computes in the reader's browser; see tools/web/live/.
   Until the reader presses the button, or opens a link that holds a setting, nothing more is fetched. Where
   anything goes wrong, the static figure stands. */
(() => {
  "use strict";
  const live = new URL("../live/", document.currentScript.src);
  const parts = [];
  let assets, worker, count = 0;
  const waiting = new Map();

  const element = (tag, props, ...children) => {
    const made = Object.assign(document.createElement(tag), props);
    made.append(...children);
    return made;
  };

  async function script(name) {
    assets ??= fetch(new URL("assets.json", live), { cache: "no-cache" }).then((reply) => {
      if (!reply.ok) throw new Error(`assets.json: HTTP ${reply.status}`);
      return reply.json();
    });
    assets.catch(() => (assets = undefined));  // so that a second try asks again
    const { version } = await assets;
    return new URL(`${name}?v=${version}`, live).href;
  }

  /* One worker serves all parts of the page. When it fails, every part falls back to its figure. */
  function broken(reason) {
    worker?.terminate();
    worker = undefined;
    const error = Object.assign(new Error(reason), { fatal: true });
    waiting.forEach((wait) => wait.reject(error));
    waiting.clear();
    parts.forEach((part) => part.running && part.fail(error));
  }

  async function call(module, request) {
    const url = await script("worker.mjs");
    if (!worker) {
      worker = new Worker(url, { type: "module", name: "python" });
      worker.onerror = (event) => broken(event.message || "the worker did not start");
      worker.onmessage = ({ data: { id, reply, fatal } }) => {
        if (fatal) return broken(fatal);
        const wait = waiting.get(id), answer = JSON.parse(reply);
        waiting.delete(id);
        if (answer.ok) wait.resolve(answer.result);
        else wait.reject(new Error(answer.error));
      };
    }
    return new Promise((resolve, reject) => {
      waiting.set(++count, { resolve, reject });
      worker.postMessage({ id: count, module: `companion.live.${module}`, request: JSON.stringify(request) });
    });
  }

  /* The setting of each part is in the address, after the #: NAME.key=value&... */
  const hash = () => new URLSearchParams(location.hash.includes("=") ? location.hash.slice(1) : "");
  function stateOf(name) {
    const mine = [...hash()].filter(([key]) => key.startsWith(`${name}.`));
    return Object.fromEntries(mine.map(([key, value]) => [key.slice(name.length + 1), value]));
  }
  const unsaved = {};
  let timer;
  function save(name, state) {
    unsaved[name] = { ...state };
    clearTimeout(timer);
    timer = setTimeout(() => {  // not at once: each change makes some browsers ask for the icon again
      const all = hash();
      for (const part in unsaved) for (const key in unsaved[part]) all.set(`${part}.${key}`, unsaved[part][key]);
      history.replaceState(null, "", `#${all}`);
    }, 300);
  }

  function upgrade(place) {
    const name = place.dataset.live;
    let cell = place;
    if (place.tagName !== "FIGURE") {
      do cell = cell.previousElementSibling; while (cell && !cell.matches(".cell"));
    }
    const pictures = cell ? [...cell.querySelectorAll(place === cell ? "img" : ".cell_output img")] : [];
    const start = element("button", { type: "button", className: "live-start", textContent: "Change the numbers" });
    const stop = element("button", { type: "button", className: "live-stop", textContent: pictures.length ? "Back to the picture" : "Close" });
    const note = element("p", { className: "live-note" });
    note.setAttribute("role", "status");
    const host = element("div", { className: "live-host" });
    const frame = element("div", { className: "live" }, start, note, host, stop);
    const show = (on) => {
      host.hidden = stop.hidden = !on;
      start.hidden = on;
      pictures.forEach((picture) => (picture.hidden = on));
    };
    let turn = 0;
    const part = {
      running: false,
      show,
      fail(error) {
        turn++;
        const focused = frame.contains(document.activeElement);
        part.running = false;
        show(false);
        start.removeAttribute("aria-disabled");
        note.textContent = `The interactive version does not run here; the figure stands as printed. (${error.message})`;
        if (focused) start.focus();
      },
      async begin(state) {
        const mine = ++turn, focused = document.activeElement === start;
        start.setAttribute("aria-disabled", "true");
        note.textContent = "Loading Python, about 6 MB, once …";
        try {
          const [ui, made] = await Promise.all(["ui.mjs", `${name}.mjs`].map(async (file) => import(await script(file))));
          const fresh = element("div", {});
          fresh.setAttribute("role", "group");
          fresh.setAttribute("aria-label", made.title);
          await made.start({ host: fresh, call, state, ui, save: (now) => mine === turn && save(name, now) });
          if (mine !== turn) return;
          host.replaceChildren(fresh);
          part.running = true;
          show(true);
          start.removeAttribute("aria-disabled");
          note.textContent = "";
          if (focused) host.querySelector("select, input, button")?.focus();
        } catch (error) {
          if (mine === turn) part.fail(error);
        }
      },
      restore() {
        const state = stateOf(name), told = Object.keys(state).length > 0;
        if (told) part.begin(state).then(() => name === first() && place.scrollIntoView({ block: "center" }));
      },
    };
    start.onclick = () => start.hasAttribute("aria-disabled") || part.begin(stateOf(name));
    stop.onclick = () => {
      turn++;
      part.running = false;
      show(false);
      start.focus();
    };
    show(false);
    place.append(frame);
    parts.push(part);
  }

  const first = () => [...hash().keys()][0]?.split(".")[0];
  const restore = () => clearTimeout(timer) ?? parts.forEach((part) => part.restore());
  const print = (on) => parts.forEach((part) => part.running && part.show(!on));
  function boot() {
    if (location.protocol === "file:" || !window.Worker || !window.WebAssembly) return;
    document.querySelectorAll("[data-live]").forEach(upgrade);
    restore();
    addEventListener("hashchange", restore);
    addEventListener("beforeprint", () => print(true));
    addEventListener("afterprint", () => print(false));
  }
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", boot);
  else boot();
})();
