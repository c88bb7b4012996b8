/* What scrolls sideways inside a page can be reached by keyboard, and a closed cell is called what it shows. */
(() => {
  "use strict";
  const SCROLLING = ["table", "pre", "div.math", "div.cell_output", "div.cell_output .output"];
  const SELECTOR = SCROLLING.map((s) => `.bd-article ${s}`).join(", ");

  function reach() {
    for (const node of document.querySelectorAll(SELECTOR)) {
      const style = getComputedStyle(node).overflowX;
      const scrolls = node.scrollWidth > node.clientWidth + 1 && (style === "auto" || style === "scroll");
      if (scrolls && !node.hasAttribute("tabindex")) {
        node.tabIndex = 0;
        node.dataset.reach = "";
      } else if (!scrolls && "reach" in node.dataset) {
        node.removeAttribute("tabindex");
        delete node.dataset.reach;
      }
    }
  }

  function start() {
    // myst-nb calls every closed cell "Toggle hidden content"; its text says more and changes with its state.
    document.querySelectorAll("summary[aria-label='Toggle hidden content']").forEach((s) => s.removeAttribute("aria-label"));
    reach();
    let timer;
    addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(reach, 200); });
    document.addEventListener("toggle", reach, true); // an opened solution
    addEventListener("load", () => (window.MathJax?.startup?.promise ?? Promise.resolve()).then(reach));
  }
  document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", start) : start();
})();
