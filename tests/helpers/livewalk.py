"""Drive an interactive part as a reader with a keyboard does, and read what it shows."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tools.browser import Tab

ROOT = Path(__file__).resolve().parents[2]
FOCUSABLE = "a[href], button, select, input, textarea, summary, [tabindex]:not([tabindex='-1'])"


class Walk:
    """One part of an open page."""

    def __init__(self, tab: Tab, name: str):
        self.tab, self.name = tab, name
        self.root = f"document.querySelector('[data-live={json.dumps(name)}]')"

    def js(self, expression: str):
        """`part` is the element of the part."""
        return self.tab.evaluate(f"(() => {{ const part = {self.root}; return {expression}; }})()")

    def start(self) -> Walk:
        """Tab from the link or control before the button to it, press Enter, wait for the first result."""
        self.tab.evaluate(f"""(() => {{
            const all = [...document.querySelectorAll({json.dumps(FOCUSABLE)})];
            const shown = all.filter(n => n.checkVisibility());
            shown[shown.indexOf({self.root}.querySelector('.live-start')) - 1].focus();
        }})()""")
        self.tab.press("Tab")
        assert self.js("document.activeElement === part.querySelector('.live-start')"), "Tab skips the button"
        self.tab.press("Enter")
        return self.running()

    def running(self) -> Walk:
        """Wait until the part runs; AssertionError with what it says if it does not start."""
        note = f"{self.root}.querySelector('.live-note').textContent"
        self.tab.until(
            f"{self.root}.querySelector('.live-host:not([hidden])') || {note}.includes('does not run')"
        )
        assert self.js("!part.querySelector('.live-host').hidden"), self.tab.evaluate(note)
        return self.settled()

    def settled(self) -> Walk:
        self.tab.until(f"{self.root}.querySelector('[role=group]').getAttribute('aria-busy') === 'false'")
        return self

    def focus(self, id: str) -> None:
        """Tab or Shift+Tab to a control, which must show that it has the focus."""
        here, there = self.tab.evaluate(f"""(() => {{
            const all = [...document.querySelectorAll({json.dumps(FOCUSABLE)})]
                .filter(n => n.checkVisibility());
            const at = (node) => all.indexOf(node);
            return [at(document.activeElement), at(document.getElementById({json.dumps(id)}))];
        }})()""")
        self.tab.press(*["Tab" if there > here else "Shift+Tab"] * abs(there - here))
        found = self.tab.evaluate("""(({ id }, look) => [id, look.outlineWidth, look.outlineStyle])(
            document.activeElement, getComputedStyle(document.activeElement))""")
        assert found[0] == id, f"Tab leads to {found[0]!r} and not to {id}"
        assert float(found[1].removesuffix("px")) >= 2 and found[2] != "none", f"{id} shows no focus"

    def settings(self) -> dict[str, str]:
        """What the controls are set to, as a reader of the page sees it: by the last part of their ids.

        Of those that are folded away, only what was set.
        """
        return self.js("""Object.fromEntries([...part.querySelectorAll('select, input')]
            .filter(n => n.value || !n.closest('details')).map(n => [
            n.id.replace(part.dataset.live + '-', ''),
            n.type === 'range' ? n.parentElement.querySelector('output').dataset.value : n.value]))""")

    def values(self) -> dict:
        """All that is marked with data-key and data-value, numbers as numbers."""
        found = self.js("[...part.querySelectorAll('[data-key]')].map(n => [n.dataset.key, n.dataset.value])")
        assert len({key for key, _ in found}) == len(found), "a key is there twice"
        return {key: _number(value) for key, value in found}

    def says(self) -> str:
        return self.js("part.querySelector('.live-say').textContent")

    def shuffle(self, rng: random.Random, controls: int = 2) -> dict[str, str]:
        """Move some of the controls, by keys alone, and wait for the result; the new settings."""
        kinds = self.js("""[...part.querySelectorAll('select, input')].filter(n => n.checkVisibility())
            .map(n => [n.id, n.type])""")
        for id, kind in rng.sample(kinds, min(controls, len(kinds))):
            self.focus(id)
            if rng.random() < 0.3:
                self.tab.press(rng.choice(("Home", "End")))
            arrows = ("ArrowRight", "ArrowLeft") if kind == "range" else ("ArrowDown", "ArrowUp")
            self.tab.press(*[rng.choice(arrows)] * rng.randint(1, 6))
        self.settled()
        return self.settings()


def _number(text: str):
    try:
        return json.loads(text)
    except ValueError:
        return text


FAULTS = """[
    ...[...part.querySelectorAll('select, input, button')]
        .filter(n => !(n.labels?.length && n.labels[0].textContent.trim()) && !n.textContent.trim())
        .map(n => 'no label: ' + n.id),
    ...[...part.querySelectorAll('input[type=range]')]
        .filter(n => n.ariaValueText !== n.parentElement.querySelector('output').textContent)
        .map(n => 'no value to read out: ' + n.id),
    ...[...part.querySelectorAll('[role=img]')]
        .filter(n => (n.ariaLabel ?? '').length < 20)
        .map(n => 'a picture without words'),
    ...(part.querySelector('[role=group]').ariaLabel ? [] : ['the group has no name']),
]"""


def accessible(walk: Walk) -> list[str]:
    """What a part's controls lack for someone who does not see them."""
    return walk.js(FAULTS)
