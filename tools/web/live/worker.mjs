// Python in a worker: a module's name and a JSON text in, the JSON text of its live() out.
const here = new URL("./", import.meta.url);
const { search } = new URL(import.meta.url); // ?v=VERSION: all files are of one build
// Pyodide's own lock file names packages; we load none. Update the versions with Pyodide.
const LOCK = JSON.stringify({
  info: { abi_version: "2026_0", arch: "wasm32", platform: "emscripten_5_0_3", python: "3.14.2", version: "314.0.7" },
  packages: {},
});
const UNPACK = `
import io, sys, zipfile
zipfile.ZipFile(io.BytesIO(packed.to_bytes())).extractall("/book")
sys.path.insert(0, "/book")
del packed
`;

// Every file is fetched here and its hash checked: Pyodide itself would wait for ever for a bad one.
async function get(url, integrity) {
  const name = url.split("/").pop().split("?")[0];
  let reply;
  try {
    reply = await fetch(url, integrity ? { integrity, mode: "cors", credentials: "omit" } : {});
  } catch {
    throw new Error(`${name} could not be loaded, or is not the file it should be`);
  }
  if (!reply.ok) throw new Error(`${name}: HTTP ${reply.status}`);
  return reply;
}

async function load() {
  const { base, integrity } = await (await get(new URL(`assets.json${search}`, here).href)).json();
  const from = new URL(base, here).href;
  const file = (name) => get(from + name, integrity[name]);
  const script = async (name) => {
    const text = await (await file(name)).text();
    return import(URL.createObjectURL(new Blob([text], { type: "text/javascript" })));
  };
  const [pyodide, inner, wasm, library, zip] = await Promise.all([
    script("pyodide.mjs"),
    script("pyodide.asm.mjs"),
    file("pyodide.asm.wasm"),
    file("python_stdlib.zip"),
    get(new URL(`companion.zip${search}`, here).href),
  ]);
  const fetched = { [`${from}pyodide.asm.wasm`]: wasm, [`${from}python_stdlib.zip`]: library };
  const plain = self.fetch;
  self.fetch = (url, options) => (fetched[url] ? Promise.resolve(fetched[url]) : plain(url, options));
  const python = await pyodide.loadPyodide({
    indexURL: from,
    lockFileContents: LOCK,
    createPyodideModule: inner.default,
  });
  self.fetch = plain;
  python.globals.set("packed", await zip.arrayBuffer());
  python.runPython(UNPACK);
  return python;
}

const late = new Promise((_, no) => setTimeout(() => no(new Error("Python did not start within 90 seconds")), 90_000));
const ready = Promise.race([load(), late]);
ready.catch((error) => postMessage({ fatal: error.message }));

onmessage = async ({ data: { id, module, request } }) => {
  const python = await ready.catch(() => null);
  if (!python) return; // said already
  try {
    const found = python.pyimport(module);
    const reply = found.live(request);
    found.destroy();
    postMessage({ id, reply });
  } catch (error) {  // live() answers mistakes itself, so this is one of ours
    postMessage({ fatal: error.message });
  }
};
